"""Requests with long lists take time in proportion to their length."""

import asyncio
import itertools
import struct
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mqd.acceptor.handlers.configs import alter_client_quotas
from mqd.acceptor.handlers.groups import offset_fetch
from mqd.acceptor.handlers.security import user_scram_credentials
from mqd.cluster.host import messages
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import security, settings
from mqd.cluster.metadata.rules.topics import alter_config
from mqd.cluster.metadata.state import MetadataState
from mqd.coordinator.group import consumer_protocol
from mqd.coordinator.group.offsets import OffsetsFetched
from mqd.coordinator.group.streams import topology
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    AlterClientQuotasRequest,
    DescribeUserScramCredentialsRequest,
    OffsetFetchRequest,
    StreamsGroupHeartbeatRequest,
)
from mqd.security.acl import AclBinding, AclFilter, PatternType, ResourceType
from tests.unit.protocol.growth import assert_linear

HEADER = RequestHeader(0, 0, 1, "client")
Call = Callable[[], object]


def running(made: Callable[[], Coroutine[Any, Any, object]]) -> Call:
    return lambda: asyncio.run(made())


def offset_fetch_of_forbidden_topics(count: int) -> Call:
    async def nothing(*_: object) -> OffsetsFetched:
        return OffsetsFetched(0)

    groups = SimpleNamespace(request=nothing)
    context: Any = SimpleNamespace(
        authorize=lambda operation, kind, name: name == "g",
        broker=SimpleNamespace(coordinators=SimpleNamespace(groups=groups)),
    )
    topics = [OffsetFetchRequest.Topic(name=f"t{number}", partition_indexes=[]) for number in range(count)]
    header = RequestHeader(9, 7, 1, "client")
    return running(lambda: offset_fetch.handle(context, header, OffsetFetchRequest(group_id="g", topics=topics)))


def quotas_that_occur_twice(count: int) -> Call:
    def entry(number: int) -> AlterClientQuotasRequest.EntryData:
        part = AlterClientQuotasRequest.EntityData(entity_type="user", entity_name=f"u{number}")
        return AlterClientQuotasRequest.EntryData(entity=[part], ops=[])

    request = AlterClientQuotasRequest(entries=[entry(number) for number in [*range(count), *range(count)]])
    return running(lambda: alter_client_quotas.handle(SimpleNamespace(broker=None), HEADER, request))  # type: ignore[arg-type]


def scram_users(count: int) -> Call:
    users = [DescribeUserScramCredentialsRequest.UserName(name=f"u{number}") for number in range(count)]
    context: Any = SimpleNamespace(broker=SimpleNamespace(metadata=SimpleNamespace(scram_credentials={})))
    request = DescribeUserScramCredentialsRequest(users=users)
    return running(lambda: user_scram_credentials.handle(context, HEADER, request))


def refused(call: Call) -> Call:
    def run() -> None:
        with pytest.raises(Refusal):
            call()

    return run


def names(count: int) -> list[str]:
    """The last two are the same, so a search for the repeated one sees all others first."""
    return [f"n{number}" for number in range(count)] + [f"n{count - 1}"]


def config_keys(count: int) -> Call:
    operations = [messages.ConfigOperation(name, "set", "1") for name in names(count)]
    change = messages.AlterConfig(2, "t", operations, False)
    unused: Any = None  # it is refused before
    return refused(lambda: alter_config(MetadataState(), change, unused, unused))


def quota_keys(count: int) -> Call:
    change = messages.AlterClientQuota([("user", "u")], [messages.QuotaOperation(name, 1.0) for name in names(count)])
    return refused(lambda: settings.alter_client_quota(MetadataState(), change))


def features(count: int) -> Call:
    change = messages.UpdateFeatures([messages.FeatureUpdate(name, 1, 1) for name in names(count)])
    return refused(lambda: settings.update_features(MetadataState(), change))


def acl_filters(count: int) -> Call:
    state, ids = MetadataState(), itertools.count()
    rules = [
        AclBinding(ResourceType.TOPIC, PatternType.LITERAL, f"t{number}", "User:u", "*", 3, 3)
        for number in range(count)
    ]
    for record in security.create_acls(state, messages.CreateAcls(rules), lambda: next(ids).to_bytes(16, "big")):
        state.apply(record)
    filters = [AclFilter(*msgspec.structs.astuple(rule)) for rule in rules]
    return lambda: security.delete_acls(state, messages.DeleteAcls(filters), 1)


def owned_partitions(count: int) -> Call:
    """A subscription that owns many partitions of one topic, which it names again and again."""
    first = struct.pack(">hi", 0, count) + struct.pack(f">{count}i", *range(count))
    owned = struct.pack(">i", 1 + count) + first + struct.pack(">hi", 0, 0) * count
    data = struct.pack(">hii", 1, 0, -1) + owned
    return lambda: consumer_protocol.decode_subscription(data)


def chained_subtopologies(count: int) -> Call:
    Request = StreamsGroupHeartbeatRequest
    chain = [
        Request.Subtopology(
            subtopology_id=str(number),
            source_topics=[] if number else ["s"],
            repartition_source_topics=[Request.TopicInfo(name=f"r{number}", partitions=0)] if number else [],
            repartition_sink_topics=[f"r{number + 1}"],
        )
        for number in range(count)
    ]
    made = topology.parse(Request.Topology(epoch=1, subtopologies=chain))
    return lambda: topology.configure(made, lambda name: 3 if name == "s" else None)


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (offset_fetch_of_forbidden_topics, 1_000),
        (quotas_that_occur_twice, 2_000),
        (scram_users, 1_000),
        (config_keys, 2_000),
        (quota_keys, 2_000),
        (features, 2_000),
        (acl_filters, 300),
        (owned_partitions, 500),
        (chained_subtopologies, 100),
    ],
)
def test_cpu_time_grows_with_the_list(made: Callable[[int], Call], count: int) -> None:
    assert_linear(made, count)
