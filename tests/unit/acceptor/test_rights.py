"""Every API with every missing right: Kafka's error code, and nothing hidden in the response.

A client with none of the rights of a case (rights_cases.py) is refused in every version; one that
lacks a single right is refused; one with all of them is not.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mqd.acceptor import rights
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.dispatch import HANDLERS
from mqd.native import PrincipalKind
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.headers import SUPPORTED
from mqd.security.acl import CLUSTER_NAME, Operation, Permission
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.rights_cases import (
    CASES,
    CLUSTER,
    GROUP,
    NAME,
    OTHER,
    TOPIC,
    Right,
    add_partitions,
    cluster,
    group,
    offset_commit,
    topic,
    transaction,
)

ADMIN = Origin(principal="User:admin", peer_ip="127.0.0.1")
ALICE = Origin(principal="User:alice", principal_kind=PrincipalKind.SASL, peer_ip="127.0.0.1")
AUTHORIZATION = {int(rights.DENIAL_ERRORS[kind]) for kind in rights.DENIAL_ERRORS}


def run(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def running(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return running


# Lists: hidden entries are left out (test_lists). Open: for all. 0, 1, 78, 79: handled by workers.
# 39 to 41 depend on the tokens: test_delegation_tokens.
WITHOUT_CODE = {16, 66} | {17, 18, 36, 60} | {0, 1, 78, 79} | {39, 40, 41}


def test_no_api_is_forgotten() -> None:
    assert CASES.keys() | WITHOUT_CODE >= HANDLERS.keys()
    assert rights.RIGHTS.keys() >= HANDLERS.keys()


@pytest.fixture
def broker_of(tmp_path: Path) -> Callable[[], HandlerBroker]:
    def make(**more: str) -> HandlerBroker:
        return HandlerBroker(tmp_path, {"authorizer.class.name": "standard", "super.users": "User:admin", **more})

    return make  # type: ignore[return-value]


def codes(response: object) -> Iterator[int]:
    for name in response.__struct_fields__:  # type: ignore[attr-defined]
        value = getattr(response, name)
        if name.endswith("error_code") and isinstance(value, int):
            yield value
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, msgspec.Struct):
                yield from codes(one)


async def start_coordinators(broker: HandlerBroker) -> None:
    for kind in (0, 1):
        request = m.FindCoordinatorRequest(key_type=kind, coordinator_keys=["g"])
        while (await broker.send_request(request, 4, ADMIN)).coordinators[0].error_code:
            await asyncio.sleep(0.01)


async def make_topic(broker: HandlerBroker, name: str) -> bytes:
    request = m.CreateTopicsRequest(
        topics=[m.CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1)], timeout_ms=5000
    )
    response = await broker.send_request(request, 7, ADMIN)
    assert response.topics[0].error_code == 0
    return bytes(response.topics[0].topic_id)


async def grant(broker: HandlerBroker, *granted: Right, permission: Permission = Permission.ALLOW) -> None:
    """Sets exactly these rules for User:alice."""
    everything = m.DeleteAclsRequest.Filter(
        resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
    )
    await broker.send_request(m.DeleteAclsRequest(filters=[everything]), 3, ADMIN)
    if granted:
        creations = [
            m.CreateAclsRequest.AclCreation(
                resource_type=kind,
                resource_name=name,
                principal="User:alice",
                host="*",
                operation=operation,
                permission_type=permission,
            )
            for operation, kind, name in granted
        ]
        response = await broker.send_request(m.CreateAclsRequest(creations=creations), 3, ADMIN)
        assert not any(result.error_code for result in response.results)


@pytest.mark.parametrize("api_key", sorted(CASES))
@run
async def test_missing_rights(broker_of: Callable[[], HandlerBroker], api_key: int) -> None:
    async with broker_of() as broker:
        topic_id = await make_topic(broker, NAME)
        await make_topic(broker, OTHER)
        await start_coordinators(broker)
        await grant(broker)
        supported = SUPPORTED[api_key]
        for case in CASES[api_key]:
            versions = case.versions or range(supported.min_version, supported.max_version + 1)
            for version in versions:
                found = [
                    code
                    for code in codes(await broker.send_request(case.make(version, topic_id), version, ALICE))
                    if code
                ]
                assert found and set(found) <= {case.denied, E.OPERATION_NOT_ATTEMPTED}, (version, found)
        for case in CASES[api_key]:
            newest = (case.versions or range(supported.max_version + 1))[-1]
            for missing in case.rights:
                await grant(broker, *(right for right in case.rights if right is not missing))
                response = await broker.send_request(case.make(newest, topic_id), newest, ALICE)
                expected = case.code_of.get(missing[1], case.denied)
                assert expected in set(codes(response)), (missing, response)
                assert set(codes(response)) <= {0, expected, E.OPERATION_NOT_ATTEMPTED}, (missing, response)
            await grant(broker, *case.rights)
            response = await broker.send_request(case.make(newest, topic_id), newest, ALICE)
            assert not set(codes(response)) & (AUTHORIZATION - {_own_refusal(api_key)}), response
            await grant(broker)
            denied = await broker.send_request(case.make(newest, topic_id), newest, ALICE)
            assert OTHER not in repr(denied), "another topic's name is disclosed"


def _own_refusal(api_key: int) -> int:
    """WriteTxnMarkers: a request that only hosts may send has this code also for clients with the
    right.
    """
    return int(E.CLUSTER_AUTHORIZATION_FAILED) if api_key == 27 else 0


@run
async def test_other_rights_do_not_help(broker_of: Callable[[], HandlerBroker]) -> None:
    """Each right on another name, and a denial beside the right."""
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        request = m.MetadataRequest(topics=[m.MetadataRequest.Topic(name=NAME)], allow_auto_topic_creation=False)
        await grant(
            broker, (Operation.ALL, TOPIC, OTHER), (Operation.ALL, GROUP, NAME), (Operation.ALL, CLUSTER, CLUSTER_NAME)
        )
        assert (await broker.send_request(request, 12, ALICE)).topics[0].error_code == E.TOPIC_AUTHORIZATION_FAILED
        await grant(broker, (Operation.READ, TOPIC, NAME))
        assert (await broker.send_request(request, 12, ALICE)).topics[0].error_code == 0
        assert (await broker.send_request(request, 12, Origin(principal="User:bob"))).topics[0].error_code


@run
async def test_resources_without_a_right_are_not_listed(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        await make_topic(broker, OTHER)
        await start_coordinators(broker)
        commit = offset_commit(9, b"")
        assert not any(codes(await broker.send_request(commit, 9, ADMIN)))
        assert not any(
            codes(
                await broker.send_request(
                    m.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=1000), 4, ADMIN
                )
            )
        )

        async def seen(origin: Origin) -> list[list[str]]:
            topics = (await broker.send_request(m.MetadataRequest(topics=None), 12, origin)).topics
            pages = (await broker.send_request(m.DescribeTopicPartitionsRequest(), 0, origin)).topics
            groups = (await broker.send_request(m.ListGroupsRequest(), 5, origin)).groups
            transactions = (await broker.send_request(m.ListTransactionsRequest(), 2, origin)).transaction_states
            fetched = (await broker.send_request(m.OffsetFetchRequest(group_id="g", topics=None), 7, origin)).topics
            return [
                sorted(one.name for one in topics if not one.is_internal),
                sorted(one.name for one in pages if not one.is_internal),
                [one.group_id for one in groups],
                [one.transactional_id for one in transactions],
                [one.name for one in fetched],
            ]

        both = sorted([NAME, OTHER])
        assert await seen(ADMIN) == [both, both, ["g"], ["x"], [NAME]]
        await grant(broker)
        assert await seen(ALICE) == [[], [], [], [], []]
        await grant(broker, topic(Operation.DESCRIBE))
        assert await seen(ALICE) == [[NAME], [NAME], [], [], []]
        await grant(broker, group(Operation.DESCRIBE))
        assert await seen(ALICE) == [[], [], ["g"], [], []]
        await grant(broker, group(Operation.READ), topic(Operation.READ))
        assert await seen(ALICE) == [[NAME], [NAME], ["g"], [], [NAME]]
        await grant(broker, cluster(Operation.DESCRIBE), transaction(Operation.DESCRIBE))
        assert await seen(ALICE) == [[], [], ["g"], ["x"], []]


@run
async def test_requests_succeed_in_part(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        await make_topic(broker, OTHER)
        await grant(
            broker,
            topic(Operation.DESCRIBE),
            (Operation.DESCRIBE, TOPIC, "not-there"),
            (Operation.CREATE, TOPIC, "new"),
        )
        requests = [m.MetadataRequest.Topic(name=name) for name in (NAME, OTHER, "not-there", "new", "hidden")]
        response = await broker.send_request(
            m.MetadataRequest(topics=requests, allow_auto_topic_creation=False), 12, ALICE
        )
        found = {one.name: one.error_code for one in response.topics}
        assert found == {
            NAME: 0,
            OTHER: E.TOPIC_AUTHORIZATION_FAILED,
            "not-there": E.UNKNOWN_TOPIC_OR_PARTITION,
            "new": E.TOPIC_AUTHORIZATION_FAILED,
            "hidden": E.TOPIC_AUTHORIZATION_FAILED,
        }
        assert all(one.topic_id == bytes(16) for one in response.topics if one.name != NAME)
        creations = [m.CreateTopicsRequest.Topic(name=name, num_partitions=1, replication_factor=1) for name in "xy"]
        creations.append(m.CreateTopicsRequest.Topic(name="new", num_partitions=1, replication_factor=1))
        made = await broker.send_request(m.CreateTopicsRequest(topics=creations, timeout_ms=5000), 7, ALICE)
        assert {one.name: one.error_code for one in made.topics} == {
            "x": E.TOPIC_AUTHORIZATION_FAILED,
            "y": E.TOPIC_AUTHORIZATION_FAILED,
            "new": 0,
        }
        created = next(one for one in made.topics if one.name == "new")
        assert created.topic_config_error_code == E.TOPIC_AUTHORIZATION_FAILED
        assert not created.configs and created.num_partitions == -1


@run
async def test_a_topic_that_is_made_automatically(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        request = m.MetadataRequest(topics=[m.MetadataRequest.Topic(name="auto")], allow_auto_topic_creation=True)
        await grant(broker, (Operation.DESCRIBE, TOPIC, "auto"))
        assert (await broker.send_request(request, 12, ALICE)).topics[0].error_code == E.TOPIC_AUTHORIZATION_FAILED
        assert "auto" not in broker.metadata.topics
        await grant(broker, (Operation.DESCRIBE, TOPIC, "auto"), (Operation.CREATE, TOPIC, "auto"))
        await broker.send_request(request, 12, ALICE)
        assert "auto" in broker.metadata.topics


@run
async def test_a_topic_by_id_is_reported_without_its_name(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        topic_id = await make_topic(broker, NAME)
        await grant(broker)
        request = m.MetadataRequest(topics=[m.MetadataRequest.Topic(topic_id=topic_id, name=None)])
        one = (await broker.send_request(request, 12, ALICE)).topics[0]
        assert (one.error_code, one.name, bytes(one.topic_id)) == (E.TOPIC_AUTHORIZATION_FAILED, None, topic_id)
        doomed = m.DeleteTopicsRequest(topics=[m.DeleteTopicsRequest.TopicState(topic_id=topic_id, name=None)])
        assert (await broker.send_request(doomed, 6, ALICE)).responses[0].name is None
        await grant(broker, topic(Operation.DESCRIBE))
        assert (await broker.send_request(doomed, 6, ALICE)).responses[0].name == NAME
        assert NAME in broker.metadata.topics


@run
async def test_authorized_operations(broker_of: Callable[[], HandlerBroker]) -> None:
    """KIP-430: the operations that the client may do, among those that the resource supports."""
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        request = m.MetadataRequest(
            topics=[m.MetadataRequest.Topic(name=NAME)],
            include_topic_authorized_operations=True,
            include_cluster_authorized_operations=True,
        )
        await start_coordinators(broker)
        await grant(broker, topic(Operation.READ), (Operation.ALTER_CONFIGS, TOPIC, NAME))
        response = await broker.send_request(request, 10, ALICE)
        expected = (Operation.READ, Operation.DESCRIBE, Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS)
        assert response.topics[0].topic_authorized_operations == sum(1 << operation for operation in expected)
        assert response.cluster_authorized_operations == 0
        await grant(broker, cluster(Operation.DESCRIBE), cluster(Operation.ALTER), group(Operation.READ))
        response = await broker.send_request(request, 10, ALICE)
        assert response.topics[0].topic_authorized_operations == -(1 << 31)
        assert response.cluster_authorized_operations == 1 << Operation.DESCRIBE | 1 << Operation.ALTER
        described = await broker.send_request(
            m.DescribeGroupsRequest(groups=["g"], include_authorized_operations=True), 5, ALICE
        )
        assert described.groups[0].authorized_operations == 1 << Operation.READ | 1 << Operation.DESCRIBE


@run
async def test_an_expression_of_a_member_matches_what_it_may_describe(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        topic_id = await make_topic(broker, NAME)
        await make_topic(broker, OTHER)
        await start_coordinators(broker)
        await grant(broker, (Operation.READ, GROUP, "k"), topic(Operation.DESCRIBE))

        async def assigned(epoch: int) -> tuple[int, set[bytes]]:
            fields = {"rebalance_timeout_ms": 1000, "subscribed_topic_regex": ".*"} if not epoch else {}
            request = m.ConsumerGroupHeartbeatRequest(
                group_id="k", member_id="member", member_epoch=epoch, topic_partitions=[], **fields
            )
            response = await broker.send_request(request, 1, ALICE)
            assert response.error_code == 0
            found = response.assignment.topic_partitions if response.assignment is not None else []
            return response.member_epoch, {bytes(one.topic_id) for one in found}

        epoch, found = await assigned(0)
        assert found == {topic_id}
        await grant(broker, (Operation.READ, GROUP, "k"))
        assert (await assigned(epoch))[1] == set(), "the right is gone"


@run
async def test_log_directories_in_versions_without_an_error(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        await grant(broker)
        for version in (1, 2):
            assert (await broker.send_request(m.DescribeLogDirsRequest(topics=None), version, ADMIN)).results
            assert (await broker.send_request(m.DescribeLogDirsRequest(topics=None), version, ALICE)).results == []


@run
async def test_responses_are_not_cached_for_other_clients(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        await broker.send_request(m.MetadataRequest(topics=None), 12, ADMIN)
        assert broker.last is not None and not broker.last.is_cacheable


@run
async def test_denials_are_only_logged(broker_of: Any, tmp_path: Path) -> None:
    async with broker_of(**{"authorizer.log.only": "true"}) as broker:
        written: list[tuple[Any, ...]] = []
        broker.broker.audit.record_denial = lambda *fields: written.append(fields)
        await make_topic(broker, NAME)
        await start_coordinators(broker)
        response = await broker.send_request(m.DescribeGroupsRequest(groups=["g"]), 5, ALICE)
        assert response.groups[0].error_code == 0
        assert written == [("User:alice", "127.0.0.1", Operation.DESCRIBE, GROUP, "g", True)]
        assert (await broker.send_request(m.MetadataRequest(topics=None), 12, ALICE)).topics


@run
async def test_other_hosts_are_not_clients(broker_of: Callable[[], HandlerBroker]) -> None:
    async with broker_of() as broker:
        await make_topic(broker, NAME)
        response = await broker.send_request(add_partitions(4, b""), 4, Origin(peer_node=2))
        assert not set(codes(response)) & AUTHORIZATION


@run
async def test_without_an_authorizer_all_is_allowed(tmp_path: Path) -> None:
    async with HandlerBroker(tmp_path) as broker:
        await make_topic(broker, NAME)
        assert (await broker.send_request(m.MetadataRequest(topics=None), 12, ALICE)).topics
        creation = CASES[30][0].make(3, b"")
        assert [one.error_code for one in (await broker.send_request(creation, 3, ALICE)).results] == [
            E.SECURITY_DISABLED
        ]
