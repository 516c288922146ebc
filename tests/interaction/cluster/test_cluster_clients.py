"""Three hosts as clients see them: leaders, coordinators, refusals, changes by the controller,
transactions over several hosts, and access to the inter-broker listener.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Consumer, KafkaError, KafkaException, Producer, TopicPartition

from mqd.base.cluster_config import LOOPBACK_KEY
from mqd.cluster.membership import handshake
from mqd.cluster.membership.handshake import HandshakeRefused, Identity, Initiator
from mqd.coordinator.internal_topic import partition_for
from mqd.coordinator.share.records import share_partition_name
from mqd.coordinator.topics import OFFSETS_TOPIC, SHARE_STATES_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DescribeClusterRequest,
    DescribeProducersRequest,
    DescribeQuorumRequest,
    ElectLeadersRequest,
    FetchRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    ListOffsetsRequest,
    ListPartitionReassignmentsRequest,
    MetadataRequest,
    OffsetFetchRequest,
    ProduceRequest,
    UnregisterBrokerRequest,
    WriteTxnMarkersRequest,
)
from tests.cluster import Cluster, Member
from tests.interaction.cluster_clients import until
from tests.interaction.coordinator.test_share_groups import Shared, take
from tests.interaction.traffic import batch
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S

PRODUCE, FETCH, LIST_OFFSETS, METADATA, HEARTBEAT, OFFSET_FETCH, FIND_COORDINATOR, CREATE_TOPICS = (
    0,
    1,
    2,
    3,
    12,
    9,
    10,
    19,
)
(
    WRITE_TXN_MARKERS,
    ELECT_LEADERS,
    ALTER_REASSIGNMENTS,
    LIST_REASSIGNMENTS,
    DESCRIBE_QUORUM,
    DESCRIBE_CLUSTER,
    DESCRIBE_PRODUCERS,
    UNREGISTER_BROKER,
) = (27, 43, 45, 46, 55, 60, 61, 64)
DELETE_RECORDS = 21


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), config={"group.initial.rebalance.delay.ms": "0"}) as started:
        yield started


def send_request(broker: Member, api: int, version: int, request: object):
    with KafkaConnection(broker.address, broker.port, timeout_s=PATIENCE_S) as kafka:
        return kafka.call(api, version, request)


def create(cluster: Cluster, name: str, assignments: list[list[int]]) -> bytes:
    """The topic's id, once every host knows the topic and its leaders."""
    topic = CreateTopicsRequest.Topic(
        name=name,
        num_partitions=-1,
        replication_factor=-1,
        assignments=[
            CreateTopicsRequest.Assignment(partition_index=index, broker_ids=nodes)
            for index, nodes in enumerate(assignments)
        ],
    )
    response = send_request(
        cluster.brokers[1], CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic], timeout_ms=60_000)
    ).topics[0]
    assert response.error_code == 0, response.error_message
    until(
        f"{name} is led",
        lambda: all(
            [p.leader_id for p in described(broker, name).partitions] == [nodes[0] for nodes in assignments]
            for broker in cluster
        ),
        cluster,
    )
    return response.topic_id


def described(broker: Member, name: str) -> MetadataRequest:
    return send_request(
        broker,
        METADATA,
        12,
        MetadataRequest(topics=[MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False),
    ).topics[0]


def produce(broker: Member, version: int, name: str, topic_id: bytes, partition: int = 0):
    data = ProduceRequest.TopicData(
        name=name,
        topic_id=topic_id,
        partition_data=[ProduceRequest.PartitionData(index=partition, records=batch(b"value"))],
    )
    return send_request(broker, PRODUCE, version, ProduceRequest(acks=-1, timeout_ms=60_000, topic_data=[data]))


def fetch(broker: Member, version: int, name: str, topic_id: bytes, epoch: int = -1):
    partition = FetchRequest.Partition(
        partition=0, current_leader_epoch=epoch, fetch_offset=0, partition_max_bytes=1 << 20
    )
    topic = FetchRequest.Topic(topic=name, topic_id=topic_id, partitions=[partition])
    return send_request(
        broker, FETCH, version, FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=1 << 20, topics=[topic])
    )


# -- leaders ---------------------------------------------------------------------------------------


def test_metadata_of_every_host_lists_all_hosts_and_leaders(cluster: Cluster) -> None:
    create(cluster, "told", [[1, 2], [2, 3], [3, 1]])
    expected = {(broker.node_id, broker.address, broker.port) for broker in cluster}
    for broker in cluster:
        response = send_request(broker, DESCRIBE_CLUSTER, 1, DescribeClusterRequest())
        assert {(one.broker_id, one.host, one.port) for one in response.brokers} == expected
        partitions = described(broker, "told").partitions
        assert [(p.leader_id, p.replica_nodes, p.error_code, p.offline_replicas) for p in partitions] == [
            (1, [1, 2], 0, []),
            (2, [2, 3], 0, []),
            (3, [3, 1], 0, []),
        ]


@pytest.mark.parametrize("wrong", [2, 3], ids=["follower", "no replica"])
def test_a_follower_names_the_leader_and_its_address(cluster: Cluster, wrong: int) -> None:
    """KIP-951."""
    name = f"led-{wrong}"
    topic_id = create(cluster, name, [[1, 2]])
    leader, other = cluster.brokers[1], cluster.brokers[wrong]
    for version in (9, 10, 12):
        response = produce(other, version, name, topic_id)
        one = response.responses[0].partition_responses[0]
        assert one.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        if version < 10:
            continue
        assert (one.current_leader.leader_id, one.current_leader.leader_epoch) == (1, 0)
        assert [(node.node_id, node.host, node.port) for node in response.node_endpoints] == [
            (1, leader.address, leader.port)
        ]
    assert produce(leader, 12, name, topic_id).responses[0].partition_responses[0].error_code == 0
    response = fetch(cluster.brokers[3], 16, name, topic_id)
    one = response.responses[0].partitions[0]
    assert (one.error_code, one.current_leader.leader_id) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, 1)
    assert [(node.node_id, node.host, node.port) for node in response.node_endpoints] == [
        (1, leader.address, leader.port)
    ]


def offset_and_epoch(broker: Member, name: str, timestamp: int) -> tuple[int, int, int]:
    """Error code, offset and leader epoch."""
    topic = ListOffsetsRequest.Topic(
        name=name,
        partitions=[ListOffsetsRequest.Partition(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)],
    )
    request = ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=[topic])
    one = send_request(broker, LIST_OFFSETS, 8, request).topics[0].partitions[0]
    return one.error_code, one.offset, one.leader_epoch


def test_offsets_are_reported_only_by_the_leader(cluster: Cluster) -> None:
    topic_id = create(cluster, "offsets", [[1, 2]])
    assert produce(cluster.brokers[1], 12, "offsets", topic_id).responses[0].partition_responses[0].error_code == 0
    for timestamp, expected in ((-1, 1), (-2, 0), (-3, 0)):
        assert offset_and_epoch(cluster.brokers[1], "offsets", timestamp) == (0, expected, 0)
        assert [offset_and_epoch(cluster.brokers[node], "offsets", timestamp) for node in (2, 3)] == [
            (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, -1)
        ] * 2


def test_the_earliest_offset_has_the_epoch_of_its_record(cluster: Cluster) -> None:
    topic_id = create(cluster, "epochs", [[1, 2]])
    assert offset_and_epoch(cluster.brokers[1], "epochs", -2) == (0, 0, 0)
    assert produce(cluster.brokers[1], 12, "epochs", topic_id).responses[0].partition_responses[0].error_code == 0
    lead_elsewhere(cluster, "epochs", 0)
    partition = described(cluster.brokers[1], "epochs").partitions[0]
    leader, epoch = cluster.brokers[partition.leader_id], partition.leader_epoch
    assert epoch > 0
    for earliest in (-2, -4):  # answered by a worker, and by the acceptor
        assert offset_and_epoch(leader, "epochs", earliest) == (0, 0, 0)
    assert produce(leader, 12, "epochs", topic_id).responses[0].partition_responses[0].error_code == 0
    assert offset_and_epoch(leader, "epochs", -1) == (0, 2, epoch)
    assert offset_and_epoch(leader, "epochs", -2) == (0, 0, 0)
    request = DeleteRecordsRequest(
        topics=[
            DeleteRecordsRequest.Topic(
                name="epochs", partitions=[DeleteRecordsRequest.Partition(partition_index=0, offset=1)]
            )
        ],
        timeout_ms=60_000,
    )
    assert send_request(leader, DELETE_RECORDS, 2, request).topics[0].partitions[0].low_watermark == 1
    assert offset_and_epoch(leader, "epochs", -2) == (0, 1, epoch)


# -- coordinators ----------------------------------------------------------------------------------


def coordinators(broker: Member, keys: list[str], key_type: int = 0) -> dict[str, tuple[int, int]]:
    response = send_request(
        broker, FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=key_type, coordinator_keys=keys)
    )
    return {one.key: (one.error_code, one.node_id) for one in response.coordinators}


def committed_error(broker: Member, group: str) -> int:
    return send_request(broker, OFFSET_FETCH, 7, OffsetFetchRequest(group_id=group, topics=None)).error_code


def test_hosts_agree_on_coordinators_and_others_refuse(cluster: Cluster) -> None:
    keys = [f"group-{number}" for number in range(12)]
    until(
        "all coordinators are there",
        lambda: all(error == 0 for broker in cluster for error, _ in coordinators(broker, keys).values()),
        cluster,
    )
    reported = [coordinators(broker, keys) for broker in cluster]
    assert reported[0] == reported[1] == reported[2]
    assert {node for _, node in reported[0].values()} == {1, 2, 3}, "every host coordinates some"
    # a heartbeat meanwhile gets a response as if the member were known, as in Kafka
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    until(
        "no group is still being loaded",
        lambda: all(committed_error(broker, key) != loading for broker in cluster for key in keys),
        cluster,
    )
    for broker in cluster:
        for key in keys:
            _, node = reported[0][key]
            beat = send_request(broker, HEARTBEAT, 4, HeartbeatRequest(group_id=key, generation_id=1, member_id="m"))
            errors = (beat.error_code, committed_error(broker, key))
            if node == broker.node_id:
                assert errors == (ErrorCode.UNKNOWN_MEMBER_ID, 0)
            else:
                assert errors == (ErrorCode.NOT_COORDINATOR, ErrorCode.NOT_COORDINATOR)


def test_transactions_span_hosts(cluster: Cluster) -> None:
    """Partitions, groups and transactional ids of all three hosts; aborted records stay invisible,
    and offsets are committed with the records.
    """
    create(cluster, "in", [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    create(cluster, "out", [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    for number in range(3):
        group, transactional_id = f"span-{number}", f"span-{number}"
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": transactional_id})
        producer.init_transactions(PATIENCE_S)
        consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, "enable.auto.commit": False})
        metadata = consumer.consumer_group_metadata()
        for commit in (False, True):
            producer.begin_transaction()
            for partition in range(3):
                producer.produce("out", f"{number}-{commit}".encode(), partition=partition)
            producer.send_offsets_to_transaction(
                [TopicPartition("in", partition, 7) for partition in range(3)], metadata, PATIENCE_S
            )
            (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_S)
        assert [
            one.offset
            for one in consumer.committed([TopicPartition("in", partition) for partition in range(3)], PATIENCE_S)
        ] == [7, 7, 7]
        consumer.close()
    reader = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    reader.assign([TopicPartition("out", partition, 0) for partition in range(3)])
    found: list[tuple[int, bytes]] = []
    ended: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < 3 and time.monotonic() < deadline:
        for message in reader.consume(100, 0.5):
            if message.error() is None:
                found.append((message.partition(), message.value()))
            elif message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    reader.close()
    assert sorted(found) == [(partition, f"{number}-True".encode()) for partition in range(3) for number in range(3)]


def test_transaction_markers_from_clients_are_refused(cluster: Cluster) -> None:
    create(cluster, "marked", [[1, 2]])
    marker = WriteTxnMarkersRequest.Marker(
        producer_id=1,
        producer_epoch=0,
        transaction_result=True,
        topics=[WriteTxnMarkersRequest.Topic(name="marked", partition_indexes=[0])],
        coordinator_epoch=0,
    )
    for broker in cluster:
        response = send_request(broker, WRITE_TXN_MARKERS, 1, WriteTxnMarkersRequest(markers=[marker]))
        assert response.markers[0].topics[0].partitions[0].error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_an_administrator_aborts_a_transaction_by_a_partition_whose_leader_does_not_coordinate_it(
    cluster: Cluster,
) -> None:
    """Admin.abortTransaction sends a marker to the leader of one partition; the coordinator, on
    another host, aborts the transaction everywhere and fences the producer.
    """
    names = {1: "hung-1", 2: "hung-2", 3: "hung-3"}
    for node, name in names.items():
        create(cluster, name, [[node, node % 3 + 1]])
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": "forgotten", "transaction.timeout.ms": 60_000}
    )
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for name in names.values():
        producer.produce(name, b"never", partition=0)
    assert producer.flush(PATIENCE_S) == 0
    coordinator = (
        send_request(
            cluster.brokers[1], FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=1, coordinator_keys=["forgotten"])
        )
        .coordinators[0]
        .node_id
    )
    leader = next(node for node in names if node != coordinator)

    def open_on(node: int) -> list:
        requests = [DescribeProducersRequest.Topic(name=names[node], partition_indexes=[0])]
        partition = (
            send_request(cluster.brokers[node], DESCRIBE_PRODUCERS, 0, DescribeProducersRequest(topics=requests))
            .topics[0]
            .partitions[0]
        )
        assert partition.error_code == 0, partition
        return [one for one in partition.active_producers if one.current_txn_start_offset >= 0]

    (found,) = open_on(leader)

    def aborted(epoch: int) -> int:
        marker = WriteTxnMarkersRequest.Marker(
            producer_id=found.producer_id,
            producer_epoch=epoch,
            transaction_result=False,
            topics=[WriteTxnMarkersRequest.Topic(name=names[leader], partition_indexes=[0])],
            coordinator_epoch=max(found.coordinator_epoch, 0),
        )
        return (
            send_request(cluster.brokers[leader], WRITE_TXN_MARKERS, 1, WriteTxnMarkersRequest(markers=[marker]))
            .markers[0]
            .topics[0]
            .partitions[0]
            .error_code
        )

    assert aborted(found.producer_epoch) == 0
    assert [open_on(node) for node in names] == [[], [], []], "one marker ends it everywhere"
    with pytest.raises(KafkaException) as fenced:
        producer.commit_transaction(PATIENCE_S)
    assert fenced.value.args[0].fatal() or fenced.value.args[0].txn_requires_abort()


# -- changes ---------------------------------------------------------------------------------------


def test_a_reassigned_partition_keeps_its_records_and_leaves_no_files(cluster: Cluster) -> None:
    topic_id = create(cluster, "moved", [[1, 2]])
    for _ in range(5):
        assert produce(cluster.brokers[1], 12, "moved", topic_id).responses[0].partition_responses[0].error_code == 0
    Target = AlterPartitionReassignmentsRequest.ReassignablePartition
    request = AlterPartitionReassignmentsRequest(
        timeout_ms=60_000,
        topics=[
            AlterPartitionReassignmentsRequest.ReassignableTopic(
                name="moved",
                partitions=[Target(partition_index=0, replicas=[3, 2]), Target(partition_index=9, replicas=[1])],
            )
        ],
    )
    response = send_request(cluster.brokers[2], ALTER_REASSIGNMENTS, 0, request)
    assert response.error_code == 0 and {
        one.partition_index: one.error_code for one in response.responses[0].partitions
    } == {0: 0, 9: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}

    def done() -> bool:
        one = described(cluster.brokers[1], "moved").partitions[0]
        return sorted(one.replica_nodes) == [2, 3] and sorted(one.isr_nodes) == [2, 3] and one.leader_id in (2, 3)

    until("the reassignment ends", done, cluster)
    assert (
        send_request(
            cluster.brokers[1], LIST_REASSIGNMENTS, 0, ListPartitionReassignmentsRequest(timeout_ms=1000, topics=None)
        ).topics
        == []
    )
    leader = described(cluster.brokers[1], "moved").partitions[0].leader_id
    assert fetch(cluster.brokers[leader], 16, "moved", topic_id).responses[0].partitions[0].high_watermark == 5
    until(
        "host 1 deletes its files",
        lambda: not any(name.startswith("moved-0") for name in os.listdir(cluster.brokers[1].data_dir / "log")),
        cluster,
    )


def test_the_preferred_leader_is_elected_on_demand(cluster: Cluster) -> None:
    create(cluster, "preferred", [[2, 1, 3]])
    requests = [ElectLeadersRequest.TopicPartitions(topic="preferred", partitions=[0, 7])]
    response = send_request(
        cluster.brokers[3],
        ELECT_LEADERS,
        2,
        ElectLeadersRequest(election_type=0, topic_partitions=requests, timeout_ms=60_000),
    )
    found = {one.partition_id: one.error_code for one in response.replica_election_results[0].partition_result}
    assert response.error_code == 0 and found == {
        0: ErrorCode.ELECTION_NOT_NEEDED,
        7: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }


def test_the_quorum_is_described_by_every_host(cluster: Cluster) -> None:
    topic = DescribeQuorumRequest.TopicData(
        topic_name="__cluster_metadata", partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
    )
    for broker in cluster:
        response = send_request(broker, DESCRIBE_QUORUM, 2, DescribeQuorumRequest(topics=[topic]))
        assert response.error_code == 0, response.error_message
        one = response.topics[0].partitions[0]
        assert (
            sorted(voter.replica_id for voter in one.current_voters) == [1, 2, 3]
            and one.leader_id in (1, 2, 3)
            and one.high_watermark > 0
        )


def test_a_live_broker_is_not_unregistered(cluster: Cluster) -> None:
    assert send_request(cluster.brokers[1], UNREGISTER_BROKER, 0, UnregisterBrokerRequest(broker_id=2)).error_code != 0
    assert (
        send_request(cluster.brokers[1], UNREGISTER_BROKER, 0, UnregisterBrokerRequest(broker_id=77)).error_code
        == ErrorCode.BROKER_ID_NOT_REGISTERED
    )
    assert len(send_request(cluster.brokers[3], DESCRIBE_CLUSTER, 1, DescribeClusterRequest()).brokers) == 3


# -- share groups ----------------------------------------------------------------------------------


def lead_elsewhere(cluster: Cluster, name: str, partition: int) -> None:
    """Moves the leader of the partition to another host; returns when every host knows it."""
    one = described(cluster.brokers[1], name).partitions[partition]
    assert one.partition_index == partition
    target = AlterPartitionReassignmentsRequest.ReassignablePartition(
        partition_index=partition, replicas=[node for node in one.replica_nodes if node != one.leader_id]
    )
    topic = AlterPartitionReassignmentsRequest.ReassignableTopic(name=name, partitions=[target])
    response = send_request(
        cluster.brokers[1],
        ALTER_REASSIGNMENTS,
        0,
        AlterPartitionReassignmentsRequest(timeout_ms=60_000, topics=[topic]),
    )
    assert response.error_code == 0 and response.responses[0].partitions[0].error_code == 0, response
    until(
        f"{name}-{partition} is led by another host",
        lambda: all(
            described(broker, name).partitions[partition].leader_id not in (-1, one.leader_id) for broker in cluster
        ),
        cluster,
    )


def test_a_share_group_follows_leaders_and_coordinators(cluster: Cluster) -> None:
    """Accepted records stay accepted, and released ones are delivered again, after other hosts have
    taken over the partition's leadership, its share state, and the group.
    """
    shared = Shared(cluster.bootstrap, partitions=1)

    def partition_of(topic: str, key: str) -> int:
        return partition_for(key, len(described(cluster.brokers[1], topic).partitions))

    def move_group() -> None:
        lead_elsewhere(cluster, OFFSETS_TOPIC, partition_of(OFFSETS_TOPIC, shared.group))

    def move_state() -> None:
        topic_id = described(cluster.brokers[1], shared.topic).topic_id
        key = share_partition_name(shared.group, topic_id, 0)
        lead_elsewhere(cluster, SHARE_STATES_TOPIC, partition_of(SHARE_STATES_TOPIC, key))

    def move_records() -> None:
        lead_elsewhere(cluster, shared.topic, 0)

    with shared.consumer("explicit") as consumer:
        for move in (move_records, move_state, move_group, move_records):
            accepted, released = f"{move.__name__} accepted", f"{move.__name__} released"
            shared.produce(accepted, released)
            responses = {released: AcknowledgeType.RELEASE}
            assert take(consumer, 2, responses) == [(accepted, 1), (released, 1)]
            move()
            assert take(consumer, 1) == [(released, 2)]


# -- between hosts ---------------------------------------------------------------------------------


def between(broker: Member) -> socket.socket:
    return socket.create_connection((broker.address, broker.port + 1), timeout=PATIENCE_S)


def shaken(
    connection: socket.socket, identity: Identity, secret: bytes = LOOPBACK_KEY, worker: int = 0, purpose: str = "data"
) -> Initiator:
    """Raises HandshakeRefused; ConnectionError when the other side closed it."""
    side = Initiator(
        handshake.derive_key(secret, "handshake"), purpose, identity, os.urandom(handshake.NONCE_BYTES), worker
    )
    connection.sendall(side.opening())
    while side.missing_bytes:
        data = connection.recv(side.missing_bytes)
        if not data:
            raise ConnectionError("closed")
        connection.sendall(side.feed(data))
    return side


API_VERSIONS = b"\x00\x00\x00\x0c\x00\x12\x00\x00\x00\x00\x00\x01\x00\x02me"


def ended(connection: socket.socket) -> bool:
    """The connection ended without a response; with a reset where bytes were left unread."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_clients_cannot_use_the_listener_between_hosts(cluster: Cluster) -> None:
    broker = cluster.brokers[1]
    cluster_id = send_request(broker, DESCRIBE_CLUSTER, 1, DescribeClusterRequest()).cluster_id
    with between(broker) as connection:  # a Kafka client that connects to the wrong listener
        connection.sendall(API_VERSIONS)
        assert ended(connection)
    with between(broker) as connection, pytest.raises(ConnectionError):
        shaken(connection, Identity(2, "", cluster_id), secret=b"not the key of this cluster at all")
    for identity, code in (
        (Identity(2, "", "another cluster"), handshake.REFUSED_CLUSTER),
        (Identity(1, "", cluster_id), handshake.REFUSED_IDENTITY),
        (Identity(2, "wiped", cluster_id), handshake.REFUSED_IDENTITY),
        (Identity(66, "", cluster_id), handshake.REFUSED_BUSY),
    ):
        with between(broker) as connection, pytest.raises(HandshakeRefused) as refused:
            shaken(connection, identity)
        assert refused.value.code == code
    with between(broker) as connection, pytest.raises(HandshakeRefused) as refused:
        shaken(connection, Identity(2, "", cluster_id), worker=99)
    assert refused.value.code == handshake.REFUSED_WORKER


def test_the_inter_broker_listener_of_an_acceptor_serves_only_transactions(cluster: Cluster) -> None:
    """A peer with the key counts as a host, and still may not do more than hosts do."""
    broker = cluster.brokers[1]
    cluster_id = send_request(broker, DESCRIBE_CLUSTER, 1, DescribeClusterRequest()).cluster_id
    with between(broker) as connection:
        side = shaken(connection, Identity(2, "", cluster_id), worker=-1)
        assert side.peer is not None and side.peer.node_id == 1
        connection.sendall(API_VERSIONS)
        assert ended(connection)
