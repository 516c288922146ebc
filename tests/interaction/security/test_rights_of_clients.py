"""Rights on the data path, with an unmodified client: who may write and read, and that a right no
longer holds once its removal has been acknowledged.
"""

from __future__ import annotations

import json
import time

import confluent_kafka
import pytest
from confluent_kafka import AcknowledgeType, KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

import mqd
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    CreateAclsRequest,
    DeleteAclsRequest,
    MetadataRequest,
    OffsetFetchRequest,
    ShareAcknowledgeRequest,
    ShareFetchRequest,
)
from mqd.security.client import security_from_properties
from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.interaction.share_members import configure_group
from tests.interaction.traffic import eventually
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory):
    """The plain listener is the administrator's."""
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("secured"), workers=2, **options))
        return brokers[-1].start()

    rights = {
        "authorizer.class.name": "standard",
        "super.users": "User:ANONYMOUS",
        "auto.create.topics.enable": "false",
    }
    secured = Secured(start, **rights)
    grant(secured, rule("*", AclOperation.READ, "group", ResourceType.GROUP))
    yield secured
    for broker in brokers:
        broker.stop()


def admin(secured: Secured) -> AdminClient:
    return AdminClient({"bootstrap.servers": secured.broker.bootstrap, "log_level": 0})


def rule(
    principal: str, operation: AclOperation, name: str, resource_type: ResourceType = ResourceType.TOPIC
) -> AclBinding:
    return AclBinding(
        resource_type, name, ResourcePatternType.LITERAL, f"User:{principal}", "*", operation, AclPermissionType.ALLOW
    )


def grant(secured: Secured, *rules: AclBinding) -> None:
    client = admin(secured)
    for future in client.create_acls(list(rules)).values():
        future.result(PATIENCE_S)


def revoke(secured: Secured, one: AclBinding) -> None:
    found = AclBindingFilter(
        one.restype, one.name, one.resource_pattern_type, one.principal, one.host, one.operation, one.permission_type
    )
    client = admin(secured)
    (future,) = client.delete_acls([found]).values()
    assert len(future.result(PATIENCE_S)) == 1


def topic_of(secured: Secured, name: str) -> str:
    client = admin(secured)
    client.create_topics([NewTopic(name, 2)])[name].result(PATIENCE_S)
    return name


def written(secured: Secured, user: str, topic: str, value: bytes = b"value") -> int | None:
    """The error code of writing one record; None: it is written."""
    errors: list[KafkaError | None] = []
    settings = {**secured.client(user), "message.timeout.ms": PATIENCE_S * 1000}
    producer = confluent_kafka.Producer(settings)
    producer.produce(topic, value, partition=0, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(PATIENCE_S) == 0
    return errors[0].code() if errors[0] is not None else None


def reader(secured: Secured, user: str, topic: str) -> confluent_kafka.Consumer:
    consumer = confluent_kafka.Consumer({**secured.client(user), "group.id": "group", "enable.auto.commit": False})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    return consumer


def test_each_client_is_limited_to_its_rights(secured: Secured) -> None:
    topic = topic_of(secured, "orders")
    grant(secured, rule("bob", AclOperation.WRITE, topic), rule("alice", AclOperation.READ, topic))
    assert written(secured, "bob", topic) is None
    assert written(secured, "alice", topic) == KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer = reader(secured, "alice", topic)
    assert consumer.poll(PATIENCE_S).value() == b"value"
    consumer.close()
    consumer = reader(secured, "bob", topic)
    assert consumer.poll(PATIENCE_S).error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer.close()

    def denied() -> set[tuple[str, str, str]]:
        whole, _, _ = (secured.broker.data_dir / "logs" / "audit.log").read_text().rpartition("\n")
        events = [json.loads(line) for line in whole.splitlines()]
        return {(one["principal"], one["operation"], one["resource"]) for one in events if one["event"] == "denied"}

    # workers hand their denials to the acceptor, which logs them after the response
    expected = {("User:alice", "WRITE", topic), ("User:bob", "READ", topic)}
    eventually(lambda: expected <= denied(), lambda: f"not all in {denied()}")


def test_a_removed_right_no_longer_holds_after_the_response(secured: Secured) -> None:
    topic = topic_of(secured, "revoked")
    reads = rule("alice", AclOperation.READ, topic)
    grant(secured, reads, rule("bob", AclOperation.WRITE, topic))
    consumer = reader(secured, "alice", topic)
    assert written(secured, "bob", topic, b"before") is None
    assert consumer.poll(PATIENCE_S).value() == b"before"
    deadline_s = time.monotonic() + 1
    while time.monotonic() < deadline_s:  # its fetches wait for records now
        assert consumer.poll(0.1) is None
    revoke(secured, reads)
    assert written(secured, "bob", topic, b"after") is None
    message = consumer.poll(PATIENCE_S)
    assert message.error() is not None and message.error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    grant(secured, reads)
    deadline_s = time.monotonic() + PATIENCE_S
    while (message := consumer.poll(1)) is None or message.error() is not None:
        assert time.monotonic() < deadline_s
    assert message.value() == b"after"
    consumer.close()


@pytest.mark.slow
def test_ten_thousand_rules_of_one_user(secured: Secured) -> None:
    """Literals and prefixes, allowed and denied: a change among them takes effect before it is
    acknowledged, and so does the removal of all.
    """
    topic, size = topic_of(secured, "many"), 10_000
    kinds = [(3, 3), (4, 3), (3, 2), (4, 2)]  # (pattern type, permission)
    with KafkaConnection("127.0.0.1", secured.broker.port, timeout_s=60) as kafka:
        for start in range(0, size, 5_000):
            creations = [
                CreateAclsRequest.AclCreation(
                    resource_type=2,
                    resource_name=f"other-{number}",
                    resource_pattern_type=kinds[number % 4][0],
                    principal="User:bob",
                    host="*",
                    operation=4,
                    permission_type=kinds[number % 4][1],
                )
                for number in range(start, start + 5_000)
            ]
            assert not any(one.error_code for one in kafka.call(30, 3, CreateAclsRequest(creations)).results)
        writes = rule("bob", AclOperation.WRITE, topic)
        for _ in range(3):
            assert written(secured, "bob", topic) == KafkaError.TOPIC_AUTHORIZATION_FAILED
            grant(secured, writes)
            assert written(secured, "bob", topic) is None
            revoke(secured, writes)
        grant(secured, writes)
        every = DeleteAclsRequest.Filter(2, None, 1, "User:bob", None, 4, 1)
        (found,) = kafka.call(31, 3, DeleteAclsRequest([every])).filter_results
        removed = [one.resource_name for one in found.matching_acls]  # with the rules of earlier tests
        assert sum(name == topic or name.startswith("other-") for name in removed) == size + 1
    assert written(secured, "bob", topic) == KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_a_share_group_needs_rights_on_group_and_topic(secured: Secured) -> None:
    topic = topic_of(secured, "shared")
    with KafkaConnection(port=secured.broker.port) as kafka:
        (found,) = kafka.call(3, 12, MetadataRequest(topics=[MetadataRequest.Topic(name=topic)])).topics
    of_group = rule("alice", AclOperation.READ, "sharers", ResourceType.GROUP)
    of_topic = rule("alice", AclOperation.READ, topic)
    with secured.connect() as kafka:
        proven(secured, kafka, "alice")
        request = ShareFetchRequest(
            group_id="sharers",
            member_id="member",
            max_records=10,
            batch_size=10,
            topics=[ShareFetchRequest.Topic(found.topic_id, [ShareFetchRequest.Partition(partition_index=0)])],
        )

        def fetched() -> list[int]:
            """The top-level error, then that of each partition; each is the first fetch of a
            session.
            """
            response = kafka.call(78, 1, request)
            return [response.error_code, *[one.error_code for part in response.responses for one in part.partitions]]

        def acknowledged() -> int:
            return kafka.call(79, 1, ShareAcknowledgeRequest("sharers", "member", share_session_epoch=1)).error_code

        assert fetched() == [ErrorCode.GROUP_AUTHORIZATION_FAILED]
        assert acknowledged() == ErrorCode.GROUP_AUTHORIZATION_FAILED
        grant(secured, of_group)
        assert fetched() == [0, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
        grant(secured, of_topic)
        eventually(lambda: fetched() == [0, 0], "the partition is served")
        revoke(secured, of_topic)
        assert fetched() == [0, ErrorCode.TOPIC_AUTHORIZATION_FAILED]
        revoke(secured, of_group)
        assert fetched() == [ErrorCode.GROUP_AUTHORIZATION_FAILED]
        assert acknowledged() == ErrorCode.GROUP_AUTHORIZATION_FAILED


def proven(secured: Secured, kafka: KafkaConnection, user: str) -> KafkaConnection:
    settings = {name: str(value) for name, value in secured.client(user).items()}
    security_from_properties(settings).authenticate(lambda key, request, version: kafka.call(key, version, request))
    return kafka


def test_names_with_wildcards_and_unicode_are_literal(secured: Secured) -> None:
    """Only the name "*" stands for others, and names are not normalised: neither of topics, groups
    nor users.
    """
    topic, composed, decomposed = topic_of(secured, "odd.good"), "gr\u00fcn", "gru\u0308n"
    looks_like_it = ("odd.*", "odd.goo?", "odd.g[o]od", "odd.g\u043eod", "odd.\uff47ood", "odd.good\u200b", "ODD.GOOD")
    alike = "\u0430lice"  # Cyrillic
    grant(
        secured,
        *(rule("alice", AclOperation.READ, name) for name in looks_like_it),
        *(rule(name, AclOperation.READ, topic) for name in (alike, "alic*", "ALICE", "alice\u200b")),
        rule("alice", AclOperation.READ, composed, ResourceType.GROUP),
        rule("alice", AclOperation.READ, "gr*", ResourceType.GROUP),
    )
    with secured.connect() as connection:
        kafka = proven(secured, connection, "alice")

        def described(name: str) -> int:
            request = MetadataRequest(topics=[MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False)
            (found,) = kafka.call(3, 12, request).topics
            return found.error_code

        def fetched(group: str) -> int:
            return kafka.call(9, 7, OffsetFetchRequest(group_id=group, topics=None)).error_code

        assert described(topic) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert {described(name) for name in looks_like_it} <= {
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        }
        refused = int(ErrorCode.GROUP_AUTHORIZATION_FAILED)
        assert [fetched(group) for group in (decomposed, "gr", "grau", "GR\u00dcN")] == [refused] * 4
        # its coordinator may have to be found first
        eventually(lambda: fetched(composed) == 0, "the group is served")
        grant(secured, rule("alice", AclOperation.READ, topic))
        assert described(topic) == 0


LETTERS_TOPIC, TAKES_LETTERS = "errors.deadletterqueue.topic.name", "errors.deadletterqueue.group.enable"


def set_topic(settings: dict, topic: str, name: str, value: str) -> None:
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    client = AdminClient(settings)
    client.incremental_alter_configs([resource])[resource].result(PATIENCE_S)


def test_dead_letters_need_the_consent_of_their_topic(secured: Secured) -> None:
    """KIP-1191: a user that configures a group can only name a topic whose configuration accepts
    dead letters, which is set by a user who may alter the topic. A topic that the user may not
    describe looks like a missing one.
    """
    hidden, letters = (topic_of(secured, name) for name in ("dlq.hidden", "dlq.seen"))
    group, alice = "workers", secured.client("alice")
    grant(
        secured,
        rule("alice", AclOperation.DESCRIBE, letters),
        rule("alice", AclOperation.ALTER_CONFIGS, group, ResourceType.GROUP),
    )
    with pytest.raises(KafkaException, match="takes no dead letters"):
        configure_group(alice, group, LETTERS_TOPIC, letters)
    configure_group(alice, group, LETTERS_TOPIC, hidden)
    configure_group(alice, group, LETTERS_TOPIC, "dlq.missing")
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        set_topic(alice, letters, TAKES_LETTERS, "true")
    set_topic({"bootstrap.servers": secured.broker.bootstrap}, letters, TAKES_LETTERS, "true")
    configure_group(alice, group, LETTERS_TOPIC, letters)


@pytest.mark.slow
def test_dead_letters_are_written_by_the_broker(secured: Secured) -> None:
    """Neither on behalf of the user who rejects the record nor of the one who configured the group."""
    topic, letters, group, alice = topic_of(secured, "worked"), "dlq.worked", "rejecting", secured.client("alice")
    operator = {"bootstrap.servers": secured.broker.bootstrap}
    set_topic(operator, topic_of(secured, letters), TAKES_LETTERS, "true")
    grant(
        secured,
        rule("alice", AclOperation.READ, topic),
        rule("alice", AclOperation.READ, group, ResourceType.GROUP),
        rule("alice", AclOperation.ALTER_CONFIGS, group, ResourceType.GROUP),
        rule("bob", AclOperation.WRITE, topic),
    )
    configure_group(alice, group, LETTERS_TOPIC, letters)
    configure_group(alice, group, "share.auto.offset.reset", "earliest")
    assert written(secured, "bob", topic, b"rejected") is None
    share = {**alice, "group.id": group, "transport": "tcp", "share.acknowledgement.mode": "explicit"}
    with mqd.ShareConsumer(share) as consumer:
        consumer.subscribe([topic])
        (message,) = consumer.poll(PATIENCE_S)
        consumer.acknowledge(message, AcknowledgeType.REJECT)
        assert set(consumer.commit_sync(PATIENCE_S).values()) == {None}
    found = confluent_kafka.Consumer({**operator, "group.id": "group", "isolation.level": "read_committed"})
    found.assign([confluent_kafka.TopicPartition(letters, 0, 0)])
    headers = dict(found.poll(PATIENCE_S).headers())
    found.close()
    assert (headers["__dlq.errors.topic"], headers["__dlq.errors.group"]) == (topic.encode(), group.encode())
    assert written(secured, "alice", letters) == KafkaError.TOPIC_AUTHORIZATION_FAILED
