"""Quotas, the quorum, elections, reassignments: with encoded requests and responses, the real
controller and its log on disk.
"""

import asyncio
import math
import time
from pathlib import Path

import pytest

from mqd import native
from mqd.acceptor import throttle
from mqd.cluster.host import messages
from mqd.cluster.metadata.features import FEATURES, founding_levels, levels
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_TOPIC
from mqd.cluster.raft.events import QuorumSettings
from mqd.controller import quotas
from mqd.native import QuotaKind
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import (
    AlterClientQuotasRequest,
    AlterPartitionReassignmentsRequest,
    ApiVersionsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeClientQuotasRequest,
    DescribeQuorumRequest,
    DescribeUserScramCredentialsRequest,
    ElectLeadersRequest,
    ListConfigResourcesRequest,
    ListPartitionReassignmentsRequest,
    MetadataRequest,
    UnregisterBrokerRequest,
    UpdateFeaturesRequest,
)
from tests.unit.acceptor.handler_broker import HandlerBroker

PRODUCE, FETCH, REQUEST = "producer_byte_rate", "consumer_byte_rate", "request_percentage"
MUTATION, CONNECTION = "controller_mutation_rate", "connection_creation_rate"
SECOND_NS = 1_000_000_000


def versions(key: int) -> range:
    return range(SUPPORTED[key].min_version, SUPPORTED[key].max_version + 1)


def alter(
    entity: dict[str, str | None], sets: dict[str, float | None], validate_only: bool = False
) -> AlterClientQuotasRequest:
    entry = AlterClientQuotasRequest.EntryData(
        entity=[
            AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.items()
        ],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in sets.items()
        ],
    )
    return AlterClientQuotasRequest(entries=[entry], validate_only=validate_only)


async def described(
    broker: HandlerBroker, components: list[tuple[str, int, str | None]], strict: bool = False, version: int = 1
):
    requests = [
        DescribeClientQuotasRequest.ComponentData(entity_type=kind, match_type=match_type, match=match)
        for kind, match_type, match in components
    ]
    response = await broker.send_request(DescribeClientQuotasRequest(components=requests, strict=strict), version)
    if response.error_code:
        return response.error_code
    return {
        entry.entity[0].entity_name: {value.key: value.value for value in entry.values} for entry in response.entries
    }


def run(scenario, tmp_path: Path, config: dict[str, str] | None = None) -> None:
    async def main() -> None:
        async with HandlerBroker(tmp_path, config) as broker:
            await scenario(broker)
            broker.shell.metadata.check()
            broker.shell.host.check()

    asyncio.run(main())


# -- quotas ----------------------------------------------------------------------------------------


def test_quotas_are_set_read_and_removed_in_every_version(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        for version in versions(49):
            client = f"c{version}"
            (entry,) = (
                await broker.send_request(alter({"client-id": client}, {PRODUCE: 1000.0, FETCH: 2000.0}), version)
            ).entries
            assert (entry.error_code, entry.error_message, entry.entity[0].entity_name) == (0, None, client)
            assert await described(broker, [("client-id", 0, client)], version=version) == {
                client: {PRODUCE: 1000.0, FETCH: 2000.0}
            }
            await broker.send_request(alter({"client-id": client}, {PRODUCE: None, REQUEST: 12.5}), version)
            assert await described(broker, [("client-id", 0, client)], version=version) == {
                client: {FETCH: 2000.0, REQUEST: 12.5}
            }
            await broker.send_request(alter({"client-id": client}, {FETCH: None, REQUEST: None}), version)
            assert await described(broker, [], version=version) == {}

    run(scenario, tmp_path)


def test_the_filter_finds_exact_default_and_any(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        for name in ("a", "b", None):
            assert not (await broker.send_request(alter({"client-id": name}, {PRODUCE: 5.0}), 1)).entries[0].error_code
        assert set(await described(broker, [("client-id", 0, "a")])) == {"a"}
        assert set(await described(broker, [("client-id", 0, "zz")])) == set()
        assert set(await described(broker, [("client-id", 1, None)])) == {None}
        assert (
            set(await described(broker, [("client-id", 2, None)]))
            == {"a", "b", None}
            == set(await described(broker, []))
        )
        assert set(await described(broker, [("client-id", 2, None)], strict=True)) == {"a", "b", None}
        assert (
            await described(broker, [("client-id", 2, None), ("user", 2, None)])
            == await described(broker, [("user", 1, None)])
            == {}
        )
        assert await described(broker, [], strict=True) == {}
        refused = ErrorCode.INVALID_REQUEST
        assert (
            await described(broker, [("client-id", 0, None)])
            == await described(broker, [("client-id", 1, "x")])
            == await described(broker, [("client-id", 3, None)])
            == refused
        )
        assert (
            await described(broker, [("client-id", 2, None), ("client-id", 1, None)])
            == await described(broker, [("ip", 2, None), ("user", 2, None)])
            == refused
        )
        assert await described(broker, [("", 2, None)]) == refused
        assert await described(broker, [("planet", 2, None)]) == ErrorCode.UNSUPPORTED_VERSION

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("entity", "sets", "part"),
    [
        ({}, {PRODUCE: 1.0}, "Invalid empty client quota entity"),
        ({"planet": "x"}, {PRODUCE: 1.0}, "Unhandled client quota entity type: planet"),
        ({"client-id": ""}, {PRODUCE: 1.0}, "Empty client-id not supported"),
        ({"user": ""}, {PRODUCE: 1.0}, "Empty user not supported"),
        ({"user": "u"}, {CONNECTION: 1.0}, "Invalid configuration key connection_creation_rate"),
        ({"ip": "10.0.0.1"}, {PRODUCE: 1.0}, "Invalid configuration key producer_byte_rate"),
        ({"ip": "10.0.0.1", "user": "u"}, {CONNECTION: 1.0}, "Invalid quota entity combination"),
        ({"ip": "somewhere"}, {CONNECTION: 1.0}, "somewhere is not a valid IP"),
        ({"ip": "10.0.0.1"}, {CONNECTION: 1.5}, "connection_creation_rate cannot be a fractional value."),
        ({"ip": "10.0.0.1"}, {CONNECTION: 3e9}, "too large for an INT"),
        ({"client-id": "c"}, {"speed": 1.0}, "Invalid configuration key speed"),
        ({"client-id": "c"}, {PRODUCE: 0.0}, "greater than 0"),
        ({"client-id": "c"}, {PRODUCE: -5.0}, "greater than 0"),
        ({"client-id": "c"}, {PRODUCE: 1.5}, "producer_byte_rate cannot be a fractional value."),
        ({"client-id": "c"}, {PRODUCE: 1e30}, "too large for a LONG"),
        ({"client-id": "c"}, {MUTATION: 0.0}, "greater than 0"),
        ({"client-id": "c"}, {REQUEST: math.nan}, "greater than 0"),
        ({"client-id": "c"}, {REQUEST: math.inf}, "greater than 0"),
    ],
)
def test_invalid_quotas_are_refused_by_name(tmp_path: Path, entity: dict, sets: dict, part: str) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        (entry,) = (await broker.send_request(alter(entity, sets), 1)).entries
        assert entry.error_code == ErrorCode.INVALID_REQUEST and part in entry.error_message
        assert broker.metadata.client_quotas == []

    run(scenario, tmp_path)


def test_doubled_entities_and_keys_are_refused_and_validation_changes_nothing(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        request = alter({"client-id": "c"}, {PRODUCE: 1.0})
        request.entries.append(request.entries[0])
        request.entries.append(alter({"client-id": "d"}, {PRODUCE: 1.0}).entries[0])
        assert [entry.error_code for entry in (await broker.send_request(request, 1)).entries] == [
            ErrorCode.INVALID_REQUEST,
            0,
        ]
        twice = alter({"client-id": "c"}, {PRODUCE: 1.0})
        twice.entries[0].ops.append(twice.entries[0].ops[0])
        assert (await broker.send_request(twice, 1)).entries[0].error_code == ErrorCode.INVALID_REQUEST
        assert (await broker.send_request(alter({"client-id": "v"}, {PRODUCE: 1.0}, validate_only=True), 1)).entries[
            0
        ].error_code == 0
        assert set(await described(broker, [])) == {"d"}

    run(scenario, tmp_path)


def test_quotas_reach_the_control_segment_with_the_default_behind(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        view = native.Quotas(broker.control)
        now = 100 * SECOND_NS
        assert view.refresh() == 0
        await broker.send_request(alter({"client-id": "own"}, {PRODUCE: 1000.0}), 1)
        assert view.refresh() == 1 << QuotaKind.PRODUCE
        await broker.send_request(alter({"client-id": None}, {PRODUCE: 10.0, REQUEST: 50.0}), 1)
        assert view.refresh() == 1 << QuotaKind.PRODUCE | 1 << QuotaKind.REQUEST
        burst = quotas.BURSTS_NS[QuotaKind.PRODUCE]
        assert view.charge(b"u", b"own", QuotaKind.PRODUCE, 20_000, now) == 20 * SECOND_NS - burst
        assert view.charge(b"u", b"other", QuotaKind.PRODUCE, 200, now) == 20 * SECOND_NS - burst
        assert view.charge(b"u", b"another", QuotaKind.PRODUCE, 100, now) == 0
        # half of a thread; the default's, since it has none of its own
        assert view.charge(b"u", b"own", QuotaKind.REQUEST, 6 * SECOND_NS, now) == 2 * SECOND_NS
        assert view.charge(b"u", b"own", QuotaKind.FETCH, 1 << 40, now) == 0
        await broker.send_request(alter({"client-id": "own"}, {PRODUCE: None}), 1)
        await broker.send_request(alter({"client-id": None}, {PRODUCE: None, REQUEST: None}), 1)
        assert view.refresh() == 0
        view.close()

    run(scenario, tmp_path)


# (user, client id) of the entity, "" for the default, None for an absent part; Kafka's order of
# precedence, from the comments of its ClientQuotaManager
PRECEDENCE = [
    ("alice", "loader"),  # /config/users/<user>/clients/<client-id>
    ("alice", ""),  # /config/users/<user>/clients/<default>
    ("alice", None),  # /config/users/<user>
    ("", "loader"),  # /config/users/<default>/clients/<client-id>
    ("", ""),  # /config/users/<default>/clients/<default>
    ("", None),  # /config/users/<default>
    (None, "loader"),  # /config/clients/<client-id>
    (None, ""),  # /config/clients/<default>
]


def test_the_first_quota_in_kafkas_order_applies(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        view = native.Quotas(broker.control)
        now, burst = 100 * SECOND_NS, quotas.BURSTS_NS[QuotaKind.PRODUCE]
        entities = [
            {kind: name or None for kind, name in (("user", user), ("client-id", client)) if name is not None}
            for user, client in PRECEDENCE
        ]
        for number, entity in enumerate(entities):  # rates of 10, 20, ...
            (entry,) = (await broker.send_request(alter(entity, {PRODUCE: 10.0 * (number + 1)}), 1)).entries
            assert entry.error_code == 0, entry.error_message
        for number, entity in enumerate(entities):
            view.refresh()
            rate = 10 * (number + 1)
            charged = view.charge(b"alice", b"loader", QuotaKind.PRODUCE, rate * 20, now)
            assert abs(charged - (20 * SECOND_NS - burst)) <= 1  # rounded
            await broker.send_request(alter(entity, {PRODUCE: None}), 1)
        assert view.refresh() == 0
        view.close()

    run(scenario, tmp_path)


def test_quotas_of_users_are_described_by_both_parts(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        for entity in ({"user": "alice"}, {"user": "alice", "client-id": "loader"}, {"client-id": "loader"}):
            await broker.send_request(alter(entity, {PRODUCE: 5.0}), 1)
        await broker.send_request(alter({"ip": None}, {CONNECTION: 3.0}), 1)

        async def found(strict: bool, *components: tuple[str, int, str | None]) -> list[dict[str, str | None]]:
            requests = [DescribeClientQuotasRequest.ComponentData(kind, how, name) for kind, how, name in components]
            response = await broker.send_request(DescribeClientQuotasRequest(components=requests, strict=strict), 1)
            return [{part.entity_type: part.entity_name for part in entry.entity} for entry in response.entries]

        both = {"client-id": "loader", "user": "alice"}
        assert await found(False, ("user", 0, "alice")) == [{"user": "alice"}, both]
        assert await found(True, ("user", 0, "alice")) == [{"user": "alice"}]
        assert await found(True, ("user", 2, None), ("client-id", 2, None)) == [both]
        assert await found(False, ("ip", 1, None)) == [{"ip": None}]
        assert len(await found(False)) == 4

    run(scenario, tmp_path)


@pytest.mark.parametrize(("version", "is_strict"), [(7, True), (5, False)])
def test_changes_of_topics_are_limited(tmp_path: Path, version: int, is_strict: bool) -> None:
    """controller_mutation_rate (KIP-599): a client in debt is refused, or delayed where its version
    has no error for that.
    """

    async def scenario(broker: HandlerBroker) -> None:
        broker.broker.quotas = native.Quotas(broker.control)
        await broker.send_request(alter({"user": "ANONYMOUS"}, {MUTATION: 1.0}), 1)
        topics = [CreateTopicsRequest.Topic(name=name, num_partitions=11, replication_factor=1) for name in "abc"]
        response = await broker.send_request(CreateTopicsRequest(topics=topics, validate_only=True), version)
        assert [one.error_code for one in response.topics] == [0, 0, 0] and response.throttle_time_ms == 0
        response = await broker.send_request(CreateTopicsRequest(topics=topics), version)
        # the burst is 11: the second topic causes a debt of 11 s, for which the third is refused
        refused = ErrorCode.THROTTLING_QUOTA_EXCEEDED if is_strict else 0
        assert [one.error_code for one in response.topics] == [0, 0, refused]
        debt_s = 11 if is_strict else 22
        assert debt_s * 1000 - 2000 < response.throttle_time_ms <= debt_s * 1000
        expected = [CreatePartitionsRequest.Topic(name="a", count=12)]
        more = await broker.send_request(
            CreatePartitionsRequest(topics=expected, timeout_ms=1000), 3 if is_strict else 2
        )
        assert more.results[0].error_code == refused and more.throttle_time_ms > 0
        gone = await broker.send_request(DeleteTopicsRequest(topic_names=["b"], timeout_ms=1000), 5 if is_strict else 4)
        assert gone.responses[0].error_code == refused and gone.throttle_time_ms > 0
        broker.broker.quotas.close()

    run(scenario, tmp_path)


def test_quotas_and_features_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def first(broker: HandlerBroker) -> None:
        await broker.send_request(alter({"client-id": "c"}, {PRODUCE: 7.0}), 1)
        assert (await broker.send_request(update("metadata.version", 28, 2), 2)).error_code == 0

    async def again(broker: HandlerBroker) -> None:
        view = native.Quotas(broker.control)
        assert view.refresh() == 1 << QuotaKind.PRODUCE  # before any client sends a request
        assert await described(broker, []) == {"c": {PRODUCE: 7.0}} and broker.metadata.features == {
            "metadata.version": 28,
            **founding_levels(),
        }
        view.close()

    run(first, tmp_path)
    run(again, tmp_path)
    monkeypatch.setattr(
        "tests.unit.acceptor.handler_broker.QUORUM_SETTINGS", QuorumSettings(log_bytes_max=1, retained_bytes=0)
    )
    run(again, tmp_path)  # writes a snapshot
    assert max(int(path.stem) for path in (tmp_path / "metadata").rglob("*.checkpoint")) > 0
    run(again, tmp_path)  # from the snapshot


def test_the_number_of_client_ids_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqd.cluster.metadata.rules.settings.CLIENT_QUOTA_COUNT_MAX", 2)

    async def scenario(broker: HandlerBroker) -> None:
        errors = [
            (await broker.send_request(alter({"client-id": f"c{i}"}, {PRODUCE: 7.0}), 1)).entries[0].error_code
            for i in range(3)
        ]
        assert errors == [0, 0, ErrorCode.POLICY_VIOLATION]
        assert (await broker.send_request(alter({"client-id": "c0"}, {PRODUCE: 8.0}), 1)).entries[0].error_code == 0

    run(scenario, tmp_path)


def test_the_burst_is_kafkas_window() -> None:
    assert quotas.bursts_ns({}) == [*quotas.BURSTS_NS] == [10 * SECOND_NS] * 3 + [11 * SECOND_NS]
    windows = {"quota.window.num": "2", "quota.window.size.seconds": "3", "controller.quota.window.num": "1"}
    assert quotas.bursts_ns(windows) == [3 * SECOND_NS] * 3 + [SECOND_NS]


class CountingQuotas:
    def __init__(self, delay_ns: int) -> None:
        self.delay_ns, self.charges = delay_ns, []

    def refresh(self) -> int:
        return 1 << QuotaKind.REQUEST

    def charge(self, user: bytes, client_id: bytes, kind: int, units: int, now_ns: int) -> int:
        self.charges.append((user, client_id, kind, units))
        return self.delay_ns


def test_work_of_the_acceptor_is_charged_and_reported_as_throttle_time(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        counting = broker.broker.quotas = CountingQuotas(1_500_001)
        response = await broker.send_request(MetadataRequest(topics=None), 12)
        assert response.throttle_time_ms == 2 and not broker.last.is_cacheable
        assert counting.charges[0][:3] == (b"ANONYMOUS", b"mqd", QuotaKind.REQUEST) and counting.charges[0][3] > 0
        counting.delay_ns = 0
        assert (
            await broker.send_request(MetadataRequest(topics=None), 12)
        ).throttle_time_ms == 0 and broker.last.is_cacheable
        await broker.send_request(DescribeQuorumRequest(), 2)  # a response without a throttle time field

    run(scenario, tmp_path)


def test_waiting_is_not_charged() -> None:
    async def handler() -> str:
        gate = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.2, gate.set_result, None)
        await gate
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.01)
        return "done"

    async def main() -> None:
        measured = throttle.TimedAwaitable(handler())
        began = time.perf_counter_ns()
        assert await measured == "done"
        assert measured.work_ns < (time.perf_counter_ns() - began) / 2
        waiting = throttle.TimedAwaitable(asyncio.get_running_loop().create_future())
        task = asyncio.get_running_loop().create_task(_await(waiting))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def _await(measured: throttle.TimedAwaitable) -> object:
        return await measured

    asyncio.run(main())


# -- features --------------------------------------------------------------------------------------


def update(name: str, level: int, upgrade_type: int = 1, validate_only: bool = False) -> UpdateFeaturesRequest:
    return UpdateFeaturesRequest(
        feature_updates=[
            UpdateFeaturesRequest.FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=upgrade_type)
        ],
        validate_only=validate_only,
    )


def test_features_are_reported_by_api_versions_and_change_by_update_features(tmp_path: Path) -> None:
    feature = FEATURES["metadata.version"]

    async def finalized(broker: HandlerBroker) -> dict[str, int]:
        response = await broker.send_request(
            ApiVersionsRequest(client_software_name="t", client_software_version="1"), 4
        )
        assert {f.name: (f.min_version, f.max_version) for f in response.supported_features} == {
            f.name: (f.first, f.last) for f in FEATURES.values()
        }
        return {f.name: f.max_version_level for f in response.finalized_features}

    async def scenario(broker: HandlerBroker) -> None:
        reported = {name: level for name, level in levels(founding_levels()).items() if level > 0}
        assert await finalized(broker) == reported
        for request in (
            update("metadata.version", feature.last + 1),
            update("metadata.version", feature.first - 1),
            update("warp.drive", 1),
            update("metadata.version", feature.first, 1),
        ):
            for version in (1, 2):
                response = await broker.send_request(request, version)
                assert (
                    response.error_code == ErrorCode.INVALID_UPDATE_VERSION
                    and request.feature_updates[0].feature in response.error_message
                )
        assert (await broker.send_request(UpdateFeaturesRequest(), 2)).error_code == ErrorCode.INVALID_REQUEST
        assert (
            await broker.send_request(update("metadata.version", feature.first, 2, validate_only=True), 2)
        ).error_code == 0
        assert await finalized(broker) == reported
        assert (await broker.send_request(update("metadata.version", feature.first, 2), 1)).results[0].error_code == 0
        assert (await finalized(broker))["metadata.version"] == feature.first
        old = UpdateFeaturesRequest(
            feature_updates=[
                UpdateFeaturesRequest.FeatureUpdateKey(feature="metadata.version", max_version_level=feature.last)
            ]
        )
        assert (await broker.send_request(old, 0)).error_code == 0
        assert (await finalized(broker))["metadata.version"] == feature.last

    run(scenario, tmp_path)


def test_unknown_stored_levels_count_as_the_nearest() -> None:
    assert levels({"metadata.version": 99, "unknown": 4})["metadata.version"] == FEATURES["metadata.version"].last
    assert "unknown" not in levels({"unknown": 4})


# -- resources -------------------------------------------------------------------------------------


def test_config_resources_by_type(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await broker.request(messages.CreateTopic("t", 1, 1, {}, {}), 1000)
        assert (await broker.send_request(ListConfigResourcesRequest(), 0)).config_resources == []
        found = {
            (one.resource_name, one.resource_type)
            for one in (await broker.send_request(ListConfigResourcesRequest(), 1)).config_resources
        }
        assert found == {("t", RESOURCE_TOPIC), ("1", RESOURCE_BROKER), ("1", 8)}
        assert (
            await broker.send_request(ListConfigResourcesRequest(resource_types=[99]), 1)
        ).error_code == ErrorCode.UNSUPPORTED_VERSION

    run(scenario, tmp_path)


# -- the cluster -----------------------------------------------------------------------------------


def test_no_election_is_needed_on_one_broker(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await broker.request(messages.CreateTopic("t", 2, 1, {}, {}), 1000)
        requests = [
            ElectLeadersRequest.TopicPartitions(topic="t", partitions=[0, 1, 2]),
            ElectLeadersRequest.TopicPartitions(topic="u", partitions=[0]),
        ]
        for version in versions(43):
            for election_type in (0, 1):
                response = await broker.send_request(
                    ElectLeadersRequest(election_type=election_type, topic_partitions=requests), version
                )
                codes = [
                    [partition.error_code for partition in topic.partition_result]
                    for topic in response.replica_election_results
                ]
                assert response.error_code == 0 and codes == [[84, 84, 3], [3]]
            assert (
                await broker.send_request(ElectLeadersRequest(topic_partitions=None), version)
            ).replica_election_results == []
        assert (
            await broker.send_request(ElectLeadersRequest(election_type=7, topic_partitions=None), 2)
        ).error_code == ErrorCode.INVALID_REQUEST

    run(scenario, tmp_path)


def test_the_quorum_is_this_host(tmp_path: Path) -> None:
    """Only this host is described; next to another topic no partition is described, as in Kafka."""

    async def scenario(broker: HandlerBroker) -> None:
        metadata, other = (
            DescribeQuorumRequest.TopicData(
                topic_name=name, partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
            )
            for name in ("__cluster_metadata", "other")
        )
        for version in versions(55):
            response = await broker.send_request(DescribeQuorumRequest(topics=[metadata]), version)
            (found,) = response.topics[0].partitions
            assert (found.error_code, found.leader_id, found.high_watermark) == (0, 1, broker.metadata.version)
            assert [(voter.replica_id, voter.log_end_offset) for voter in found.current_voters] == [
                (1, broker.metadata.version)
            ] and found.observers == []
            assert version < 2 or [node.node_id for node in response.nodes] == [1]
            for topics in ([metadata, other], [other]):
                response = await broker.send_request(DescribeQuorumRequest(topics=topics), version)
                codes = [topic.partitions[0].error_code for topic in response.topics]
                assert codes == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * len(topics) and response.nodes == []

    run(scenario, tmp_path)


def test_reassignments_brokers_and_credentials_on_one_broker(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await broker.request(messages.CreateTopic("t", 1, 1, {}, {}), 1000)
        for version in versions(45):
            expected = {None: 85, (1,): 0, (2,): 39, (1, 1): 39, (): 39}
            for replicas, code in expected.items():
                partition = AlterPartitionReassignmentsRequest.ReassignablePartition(
                    partition_index=0, replicas=None if replicas is None else list(replicas)
                )
                topic = AlterPartitionReassignmentsRequest.ReassignableTopic(name="t", partitions=[partition])
                response = await broker.send_request(AlterPartitionReassignmentsRequest(topics=[topic]), version)
                assert response.error_code == 0 and response.responses[0].partitions[0].error_code == code
        assert (await broker.send_request(ListPartitionReassignmentsRequest(topics=None), 0)).topics == []
        assert (
            await broker.send_request(UnregisterBrokerRequest(broker_id=1), 0)
        ).error_code == ErrorCode.INVALID_REQUEST
        assert (
            await broker.send_request(UnregisterBrokerRequest(broker_id=2), 0)
        ).error_code == ErrorCode.BROKER_ID_NOT_REGISTERED
        users = [DescribeUserScramCredentialsRequest.UserName(name=name) for name in ("u", "v", "v")]
        response = await broker.send_request(DescribeUserScramCredentialsRequest(users=users), 0)
        assert response.error_code == 0 and [(one.user, one.error_code) for one in response.results] == [
            ("u", 91),
            ("v", 92),
        ]
        assert (await broker.send_request(DescribeUserScramCredentialsRequest(users=None), 0)).results == []

    run(scenario, tmp_path)
