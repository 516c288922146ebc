"""The table of rights: every API with every missing right, as requests that a client may send to
both brokers. The part of a response in `shown` is compared, or recorded.
A row is a case (tests/unit/acceptor/rights_cases.py, and MORE) in a version with a scenario: which
A row is a case (tests/unit/acceptor/rights_cases.py, and MORE) in a version with a scenario: the
client's rules. `run` sends it to one broker.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from mqd.protocol import KNOWN
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.records import Record, encode_batch
from mqd.security.acl import Operation, Permission, ResourceType
from tests.unit.acceptor.rights_cases import (
    CASES,
    CLUSTER,
    NAME,
    OTHER,
    TOPIC,
    Case,
    Right,
    cluster,
    group,
    topic,
    transaction,
)

USER, PASSWORD = "alice", "alice-secret"
Rule = tuple[Right, Permission]
Ask = Callable[[int, int, Any], object | None]  # api key, version, request -> the response; None: the connection ended
AUTHORIZATION = {int(code) for code in E if "AUTHORIZATION_FAILED" in code.name}
NAMES = (NAME, OTHER)
METADATA = 3
LOADING = {E.COORDINATOR_LOAD_IN_PROGRESS, E.COORDINATOR_NOT_AVAILABLE}
LOADING_S = 10.0


def produce(transactional_id: str | None) -> Callable[[int, bytes], Any]:
    batch = encode_batch([Record(b"v", b"k")], compression="none")

    def make(version: int, topic_id: bytes) -> Any:
        named = {"topic_id": topic_id} if version >= 13 else {"name": NAME}
        data = m.ProduceRequest.TopicData(partition_data=[m.ProduceRequest.PartitionData(0, batch)], **named)
        return m.ProduceRequest(transactional_id, 1, 10_000, [data])

    return make


def fetch(version: int, topic_id: bytes) -> Any:
    named = {"topic_id": topic_id} if version >= 13 else {"topic": NAME}
    part = m.FetchRequest.Partition(partition=0, partition_max_bytes=1 << 20)
    return m.FetchRequest(
        replica_id=-1, max_wait_ms=0, min_bytes=0, topics=[m.FetchRequest.Topic(partitions=[part], **named)]
    )


def share_fetch(topic_id: bytes, member: str, epoch: int) -> Any:
    part = m.ShareFetchRequest.Partition(partition_index=0)
    return m.ShareFetchRequest(
        group_id="g",
        member_id=member,
        share_session_epoch=epoch,
        max_bytes=1 << 20,
        max_records=10,
        batch_size=10,
        topics=[m.ShareFetchRequest.Topic(topic_id=topic_id, partitions=[part])],
    )


def share_acknowledge(topic_id: bytes, member: str, epoch: int) -> Any:
    batch = m.ShareAcknowledgeRequest.AcknowledgementBatch(1 << 40, 1 << 40, [1])  # which it does not hold
    part = m.ShareAcknowledgeRequest.Partition(partition_index=0, acknowledgement_batches=[batch])
    return m.ShareAcknowledgeRequest(
        group_id="g",
        member_id=member,
        share_session_epoch=epoch,
        topics=[m.ShareAcknowledgeRequest.Topic(topic_id=topic_id, partitions=[part])],
    )


def member_id() -> str:
    """A Kafka UUID."""
    return base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")


def create_topics(name: str) -> Callable[[int, bytes], Any]:
    asked = m.CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1)
    return lambda version, _: m.CreateTopicsRequest(topics=[asked], timeout_ms=10_000, validate_only=version >= 1)


def metadata(topics: list[m.MetadataRequest.Topic] | None) -> Callable[[int, bytes], Any]:
    return lambda version, _: m.MetadataRequest(
        topics=topics if topics is not None or version else [],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=8 <= version <= 10,
        include_topic_authorized_operations=version >= 8,
    )


def by_id(version: int, topic_id: bytes) -> Any:
    return m.MetadataRequest(topics=[m.MetadataRequest.Topic(topic_id=topic_id, name=None)])


def all_offsets(version: int, _: bytes) -> Any:
    if version < 8:
        return m.OffsetFetchRequest(group_id="g", topics=None)
    return m.OffsetFetchRequest(groups=[m.OffsetFetchRequest.Group(group_id="g", topics=None)])


TOKEN_OWNER = "hidden-owner"
HMACS: list[bytes] = []  # of the owner's token at the current broker, by `prepare_token`


def renew(_version: int, _topic_id: bytes) -> Any:
    return m.RenewDelegationTokenRequest(hmac=HMACS[-1], renew_period_ms=-1)


def expire(_version: int, _topic_id: bytes) -> Any:
    return m.ExpireDelegationTokenRequest(hmac=HMACS[-1], expiry_time_period_ms=-1)


def describe_tokens(_version: int, _topic_id: bytes) -> Any:
    return m.DescribeDelegationTokenRequest(owners=None)


DESCRIBE = Operation.DESCRIBE
# whether the client sees the token with the first right is tested where the second is missing
SEES_TOKENS: tuple[tuple[Right, ...], ...] = (
    ((Operation.DESCRIBE_TOKENS, ResourceType.USER, f"User:{TOKEN_OWNER}"), topic(DESCRIBE)),
    ((DESCRIBE, ResourceType.DELEGATION_TOKEN, "*"), topic(DESCRIBE)),
)
MORE: dict[int, list[Case]] = {
    0: [
        Case(produce(None), (topic(Operation.WRITE),), E.TOPIC_AUTHORIZATION_FAILED),
        Case(produce("x"), (transaction(Operation.WRITE), topic(Operation.WRITE)), E.NONE),
    ],
    1: [Case(fetch, (topic(Operation.READ),), E.TOPIC_AUTHORIZATION_FAILED)],
    3: [
        Case(metadata(None), (topic(DESCRIBE),), E.NONE),
        Case(metadata([m.MetadataRequest.Topic(name=name) for name in (*NAMES, "none")]), (topic(DESCRIBE),), E.NONE),
        Case(by_id, (topic(DESCRIBE),), E.NONE, versions=range(12, 14)),
        Case(metadata(None), (cluster(DESCRIBE), cluster(Operation.ALTER)), E.NONE, versions=range(8, 11)),
    ],
    9: [Case(all_offsets, (group(DESCRIBE), topic(DESCRIBE)), E.NONE, versions=range(2, 10))],
    15: [
        Case(
            lambda version, _: m.DescribeGroupsRequest(groups=["g"], include_authorized_operations=version >= 3),
            (group(Operation.READ), group(Operation.DELETE)),
            E.NONE,
        )
    ],
    14: [  # incomplete: refused for that, whatever the rights
        Case(
            lambda *_: m.SyncGroupRequest(group_id="g", member_id="gone"), (group(Operation.READ),), E.NONE, range(5, 6)
        )
    ],
    16: [
        Case(lambda *_: m.ListGroupsRequest(), (group(DESCRIBE),), E.NONE),
        Case(lambda *_: m.ListGroupsRequest(), (cluster(DESCRIBE),), E.NONE),
    ],
    19: [
        Case(create_topics("hidden-new"), (cluster(Operation.CREATE),), E.NONE),
        Case(create_topics("hidden-new"), ((Operation.CREATE, TOPIC, "hidden-new"),), E.NONE),
    ],
    39: [Case(renew, rights, E.DELEGATION_TOKEN_OWNER_MISMATCH) for rights in SEES_TOKENS],
    40: [Case(expire, rights, E.DELEGATION_TOKEN_OWNER_MISMATCH) for rights in SEES_TOKENS],
    41: [Case(describe_tokens, rights, E.NONE) for rights in SEES_TOKENS],
    60: [
        Case(
            lambda *_: m.DescribeClusterRequest(include_cluster_authorized_operations=True),
            (cluster(DESCRIBE), cluster(Operation.CREATE)),
            E.NONE,
        )
    ],
    66: [Case(lambda *_: m.ListTransactionsRequest(), (transaction(DESCRIBE),), E.NONE)],
    75: [Case(lambda *_: m.DescribeTopicPartitionsRequest(), (topic(DESCRIBE),), E.NONE)],
    78: [
        Case(
            lambda _, topic_id: share_fetch(topic_id, member_id(), 0),
            (group(Operation.READ), topic(Operation.READ)),
            E.NONE,
        )
    ],
    79: [
        Case(
            lambda _, topic_id: share_acknowledge(topic_id, member_id(), 1),
            (group(Operation.READ), topic(Operation.READ)),
            E.NONE,
        )
    ],
}


# -- rows ------------------------------------------------------------------------------------------


class Row(NamedTuple):
    name: str  # "Fetch 4 #0 without READ TOPIC"
    api_key: int
    version: int
    case: Case
    rules: tuple[Rule, ...]
    is_newest: bool


def rows(versions: Callable[[int], tuple[int, int] | None]) -> Iterator[Row]:
    """`versions(api key)`: (oldest, newest) of the broker; both are used."""
    for api_key in sorted(CASES.keys() | MORE.keys()):
        known, ours = versions(api_key), SUPPORTED[api_key]
        if known is None:
            continue
        # Kafka advertises Produce from 0 on for librdkafka's sake, and supports 3 and later.
        first, last = max(known[0], ours.min_version, 3 if api_key == 0 else 0), min(known[1], ours.max_version)
        for number, case in enumerate([*CASES.get(api_key, ()), *MORE.get(api_key, ())]):
            allowed = [one for one in range(first, last + 1) if case.versions is None or one in case.versions]
            for version in sorted({*allowed[:1], *allowed[-1:]}):
                for scenario, rules in scenarios(case):
                    yield Row(
                        f"{KNOWN[api_key].name} {version} #{number} {scenario}",
                        api_key,
                        version,
                        case,
                        rules,
                        version == allowed[-1],
                    )


def scenarios(case: Case) -> Iterator[tuple[str, tuple[Rule, ...]]]:
    every = _allowed(case.rights)
    yield "all", every
    yield "none", ()
    for right in case.rights:
        said = f"{right[0].name} {right[1].name}"
        if len(case.rights) > 1:
            yield f"without {said}", tuple(rule for rule in every if rule[0] is not right)
        yield f"denied {said}", (*every, (right, Permission.DENY))
    resources = sorted({(kind, name) for _, kind, name in case.rights})
    yield "describe", _allowed((DESCRIBE, kind, name) for kind, name in resources)
    yield "others", _allowed((Operation.ALL, kind, OTHER) for kind, _ in resources if kind != CLUSTER)


def _allowed(rights: Iterable[Right]) -> tuple[Rule, ...]:
    return tuple((right, Permission.ALLOW) for right in rights)


# -- answers ---------------------------------------------------------------------------------------


def shown(response: object | None, topic_id: bytes, is_allowed: bool) -> dict[str, list[Any]]:
    """The error codes, the names and the ids of a response, by field. `is_allowed`: the client has
    all rights, and only authorization codes are relevant.
    """
    found: dict[str, set[Any]] = {}
    if response is None:
        return {"": ["the connection ended"]}
    for path, value in _leaves(response, ""):
        if path.endswith("error_code"):
            if not is_allowed or value in AUTHORIZATION:
                found.setdefault(path, set()).add(value)
        elif is_allowed or path.endswith("error_message"):
            continue
        elif path.endswith("authorized_operations") or (isinstance(value, str) and value.startswith("hidden")):
            found.setdefault(path, set()).add(value)
        elif value == topic_id:
            found.setdefault(path, set()).add("<id>")
        elif path.endswith(("records", "high_watermark")):
            found.setdefault(path, set()).add("<data>" if value not in (None, b"", -1) else "")
    return {path: sorted(values) for path, values in sorted(found.items())}


def _leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _leaves(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one, f"{path}[]")
    else:
        yield path, value


# -- one broker ------------------------------------------------------------------------------------


class Granting:
    """Sets the client's rules through an administrator's connection, and waits until the
    authorizers of this broker and of `others` have them.
    """

    def __init__(self, admin: Ask, others: Sequence[Ask] = (), principal: str = f"User:{USER}") -> None:
        self._admin, self._others, self._principal = admin, others, principal
        self._rules: tuple[Rule, ...] | None = None

    def grant(self, rules: tuple[Rule, ...]) -> None:
        if rules == self._rules:
            return
        everything = m.DeleteAclsRequest.Filter(
            resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
        )
        self._admin(31, 3, m.DeleteAclsRequest(filters=[everything]))
        creations = [
            m.CreateAclsRequest.AclCreation(
                resource_type=kind,
                resource_name=name,
                resource_pattern_type=3,
                principal=self._principal,
                host="*",
                operation=operation,
                permission_type=permission,
            )
            for (operation, kind, name), permission in rules
        ]
        if creations:
            made = self._admin(30, 3, m.CreateAclsRequest(creations=creations))
            assert not any(one.error_code for one in made.results), made
        ask = m.DescribeAclsRequest(resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1)
        for admin in (self._admin, *self._others):
            while sum(len(one.acls) for one in admin(29, 3, ask).resources) != len(set(rules)):
                pass  # polls another process; nothing here can be waited for
        self._rules = rules


def prepare(admin: Ask) -> None:
    """Creates the topics, the coordinators, and entries of lists: a record, a group with an offset,
    a transaction.
    """
    for name in NAMES:
        make_topic(admin, name)
    for kind, key in ((0, "g"), (1, "x")):
        _until(lambda kind=kind, key=key: admin(10, 3, m.FindCoordinatorRequest(key=key, key_type=kind)))
    _until(lambda: admin(22, 4, m.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=60_000)))
    part = m.OffsetCommitRequest.Partition(partition_index=0, committed_offset=1)
    commit = m.OffsetCommitRequest(group_id="g", topics=[m.OffsetCommitRequest.Topic(name=NAME, partitions=[part])])
    _until(lambda: admin(8, 8, commit).topics[0].partitions[0])
    _until(lambda: admin(0, 9, produce(None)(9, b"")).responses[0].partition_responses[0])


def prepare_token(owner: Ask) -> None:
    """A token unrelated to alice. `owner` is TOKEN_OWNER, authenticated by a password."""
    made: Any = owner(38, 3, m.CreateDelegationTokenRequest(max_lifetime_ms=-1))
    assert made.error_code == 0, made
    HMACS[:] = [bytes(made.hmac)]
    while not owner(41, 3, describe_tokens(3, b"")).tokens:  # type: ignore[union-attr]
        pass  # polls another process; nothing here can be waited for


def make_topic(admin: Ask, name: str) -> bytes:
    """Creates it unless it exists; returns its id."""
    ask = m.MetadataRequest(topics=[m.MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False)
    while True:
        (found,) = admin(3, 12, ask).topics
        if found.error_code == E.UNKNOWN_TOPIC_OR_PARTITION:
            made = m.CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1)
            admin(19, 7, m.CreateTopicsRequest(topics=[made], timeout_ms=10_000))
        elif not found.error_code and found.partitions[0].leader_id >= 0:
            return bytes(found.topic_id)


def remove_topic(admin: Ask, name: str) -> None:
    """Deletes it, if it exists: other tests' broker-wide listings would have it."""
    ask = m.MetadataRequest(topics=[m.MetadataRequest.Topic(name=name)], allow_auto_topic_creation=False)
    while admin(3, 12, ask).topics[0].error_code != E.UNKNOWN_TOPIC_OR_PARTITION:
        admin(20, 5, m.DeleteTopicsRequest(topic_names=[name], timeout_ms=10_000))


def _until(ask: Callable[[], Any]) -> None:
    while ask().error_code:
        pass  # polls another process; nothing here can be waited for


def _retried(ask: Ask, api_key: int, version: int, request: Any) -> object | None:
    """Retries, as clients do, while a coordinator is being loaded. No recorded response has such an
    error, so one that remains after LOADING_S is a difference.
    """
    deadline = time.monotonic() + LOADING_S
    while True:
        response = ask(api_key, version, request)
        codes = {value for path, value in _leaves(response, "") if path.endswith("error_code")}
        if codes.isdisjoint(LOADING) or time.monotonic() > deadline:
            return response


def run(
    admin: Ask, alice: Ask, wanted: Iterable[Row], before: Ask | None = None, others: Sequence[Ask] = ()
) -> dict[str, dict[str, list[Any]]]:
    """Alice's results, by row. `before`: another client, which requests the same metadata first,
    since a broker caches such responses. Rows with the same rules are run together.
    """
    granting, found = Granting(admin, others), {}
    topic_id = make_topic(admin, NAME)
    for row in sorted(wanted, key=lambda row: repr(row.rules)):
        granting.grant(row.rules)
        request = row.case.make(row.version, topic_id)
        if before is not None and row.api_key == METADATA:
            before(row.api_key, row.version, request)
        response = _retried(alice, row.api_key, row.version, request)
        found[row.name] = shown(response, topic_id, row.name.endswith(" all"))
        if row.api_key in (20, 42, 47) and row.name.endswith((" all", " describe")):
            prepare(admin)
            topic_id = make_topic(admin, NAME)
    return found


def advertised(ask: Ask) -> Callable[[int], tuple[int, int] | None]:
    body: Any = ask(18, 0, m.ApiVersionsRequest())
    known = {one.api_key: (one.min_version, one.max_version) for one in body.api_keys}
    return known.get


@contextlib.contextmanager
def asking(connect: Callable[[], Any]) -> Iterator[Ask]:
    """Over a connection that is reopened when the broker has closed it."""
    open_: list[Any] = []

    def ask(api_key: int, version: int, request: Any) -> object | None:
        from tests.kafka_connection import ConnectionEnded

        if not open_:
            open_.append(connect())
        try:
            return open_[0].call(api_key, version, request)
        except (ConnectionEnded, TimeoutError):
            open_.pop().close()
            return None

    try:
        yield ask
    finally:
        for one in open_:
            one.close()
