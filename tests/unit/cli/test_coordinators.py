"""Conclusions of commands from coordinators that know nothing: valid only if every coordinator has
responded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.cli import broker_lookup as cluster_module
from mqd.cli import retirement as retiring
from mqd.cli import transactions as txns
from mqd.cli.broker_lookup import Cluster
from mqd.cli.common import CliError
from mqd.coordinator.topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    MetadataRequest,
    MetadataResponse,
    WriteTxnMarkersRequest,
)

PRODUCER = 5


class World:
    """Two brokers. Topic "t" is led by broker 1 and has a transaction open since offset 41; the
    coordinators' topics have the leaders in `leaders`: None, the topic does not exist.
    """

    def __init__(self) -> None:
        self.leaders: dict[str, list[int] | None] = {TRANSACTIONS_TOPIC: [1, 2], OFFSETS_TOPIC: [1, 2]}
        self.known: list[tuple[str, int, str]] = []  # id, error of its description, state; by broker 2
        self.when_listed: Callable[[], None] = lambda: None
        self.groups_error = 0
        self.groups: list[tuple[str, str, int]] = []  # broker, id, error of its description
        self.step = retiring.SEALED
        self.requested: list[Any] = []

    def answer(self, bootstrap: str, request: Any) -> Any:
        self.requested.append(request)
        if isinstance(request, MetadataRequest):
            names = ["t", *self.leaders] if request.topics is None else [one.name for one in request.topics]
            brokers = [MetadataResponse.Broker(node_id=node, host=f"host{node}", port=9092) for node in (1, 2)]
            return MetadataResponse(brokers=brokers, topics=[self._topic(name) for name in names])
        if isinstance(request, DescribeProducersRequest):
            open_here = DescribeProducersResponse.ProducerState(
                producer_id=PRODUCER, current_txn_start_offset=41, last_timestamp=0
            )
            return DescribeProducersResponse(
                topics=[self._producers(topic, [open_here] if topic.name == "t" else []) for topic in request.topics]
            )
        if isinstance(request, ListTransactionsRequest):
            self.when_listed()
            states = [
                ListTransactionsResponse.TransactionState(
                    transactional_id=name, producer_id=PRODUCER, transaction_state=state
                )
                for name, _, state in self.known
            ]
            return ListTransactionsResponse(transaction_states=states if bootstrap == "host2:9092" else [])
        if isinstance(request, DescribeTransactionsRequest):
            return DescribeTransactionsResponse(
                transaction_states=[self._described(name) for name in request.transactional_ids]
            )
        if isinstance(request, ListGroupsRequest):
            listed = [
                ListGroupsResponse.Group(group_id=name, protocol_type="consumer")
                for broker, name, _ in self.groups
                if broker == bootstrap
            ]
            return ListGroupsResponse(error_code=self.groups_error, groups=listed)
        if isinstance(request, DescribeGroupsRequest):
            groups = [
                DescribeGroupsResponse.Group(error_code=error, group_id=name, group_state="Empty")
                for broker, name, error in self.groups
                if broker == bootstrap
            ]
            return DescribeGroupsResponse(groups=groups)
        if isinstance(request, CreatePartitionsRequest):
            if request.topics[0].retirement_action == retiring.RELEASE:
                self.step = retiring.REDIRECTED
            under_way = CreatePartitionsResponse.Retirement(step=self.step, applied=True, remaining=1)
            return CreatePartitionsResponse(
                results=[CreatePartitionsResponse.TopicResult(name="t", retirement=under_way)]
            )
        raise AssertionError(f"unexpected {request}")

    def _topic(self, name: str) -> Any:
        leaders = [1] if name == "t" else self.leaders[name]
        if leaders is None:
            return MetadataResponse.Topic(name=name, error_code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        return MetadataResponse.Topic(
            name=name,
            partitions=[
                MetadataResponse.Partition(partition_index=index, leader_id=leader)
                for index, leader in enumerate(leaders)
            ],
        )

    def _producers(self, topic: Any, there: list[Any]) -> Any:
        partitions = [
            DescribeProducersResponse.PartitionResponse(partition_index=index, active_producers=there)
            for index in topic.partition_indexes
        ]
        return DescribeProducersResponse.TopicResponse(name=topic.name, partitions=partitions)

    def _described(self, name: str) -> Any:
        ((error, state),) = [(error, state) for known, error, state in self.known if known == name]
        topics = [DescribeTransactionsResponse.Topic(topic="t", partitions=[0])]
        return DescribeTransactionsResponse.TransactionState(
            error_code=error,
            transactional_id=name,
            producer_id=PRODUCER,
            transaction_state=state,
            topics=topics,
            transaction_start_time_ms=0,
            transaction_timeout_ms=0,
            producer_epoch=0,
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    class Broker:
        def __init__(self, bootstrap: str, advertised_by: int | None = None) -> None:
            self._bootstrap = bootstrap

        def __enter__(self) -> Broker:
            return self

        def __exit__(self, *_: object) -> None: ...

        def request(self, _api_key: int, request: object, _version_max: int = 0) -> Any:
            return found.answer(self._bootstrap, request)

    monkeypatch.setattr(cluster_module, "Broker", Broker)
    return found


def hanging() -> list[int]:
    with Cluster("host1:9092") as cluster:
        return [one.start_offset for one in txns.hanging_transactions(cluster, 0)]


@pytest.mark.parametrize(
    ("leaders", "known", "expected"),
    [
        ([1, 2], [], [41]),
        (None, [], [41]),
        ([1, 2], [("x", 0, "PrepareCommit")], []),
        ([1, 2], [("x", 0, "CompleteCommit")], [41]),
        ([1, 2], [("x", int(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND), "Ongoing")], [41]),
    ],
)
def test_transactions_unknown_to_their_coordinators_hang(
    world: World, leaders: list[int] | None, known: list[tuple[str, int, str]], expected: list[int]
) -> None:
    world.leaders[TRANSACTIONS_TOPIC], world.known = leaders, known
    assert hanging() == expected


def test_nothing_is_listed_as_hanging_while_a_coordinator_is_unavailable(world: World) -> None:
    world.leaders[TRANSACTIONS_TOPIC] = [1, -1]
    with pytest.raises(CliError, match="for example __transaction_state-1.*coordinators are unavailable"):
        hanging()


def test_nothing_is_listed_as_hanging_when_a_coordinator_moves_meanwhile(world: World) -> None:
    world.when_listed = lambda: world.leaders.update({TRANSACTIONS_TOPIC: [1, 1]})
    with pytest.raises(CliError, match="changing"):
        hanging()


def test_nothing_is_listed_as_hanging_when_a_transaction_is_not_described(world: World) -> None:
    world.known = [("x", int(ErrorCode.NOT_COORDINATOR), "Ongoing")]
    with pytest.raises(CliError, match="transactional id x"):
        hanging()


NOT_COORDINATOR = int(ErrorCode.NOT_COORDINATOR)


def listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], noun: str, *options: str
) -> tuple[int, list[str], str]:
    """Exit code, the first words of the output's lines, and stderr."""
    from mqd.cli import main

    monkeypatch.setenv("MQD_BOOTSTRAP", "host1:9092")
    code = main._run([noun, "list", *options])
    output = capsys.readouterr()
    return code, [line.split()[0] for line in output.out.splitlines()], output.err


def test_transactions_are_listed_without_one_whose_coordinator_is_just_changing(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.known = [("x", 0, "Ongoing"), ("y", NOT_COORDINATOR, "Ongoing")]
    assert listed(monkeypatch, capsys, "txn") == (
        0,
        ["TRANSACTIONAL", "x"],
        "mqd: 1 transactional id is left out (y): coordinators are changing; try again\n",
    )
    world.known = [("z", NOT_COORDINATOR, "Ongoing"), ("y", NOT_COORDINATOR, "Ongoing")]
    assert listed(monkeypatch, capsys, "txn") == (
        0,
        [],
        "mqd: 2 transactional ids are left out (y, ...): coordinators are changing; try again\n",
    )


def test_only_open_transactions_are_open_for_longer(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brokers also list transactions that have ended since, as Kafka does."""
    world.known = [("x", 0, "Ongoing"), ("y", 0, "CompleteCommit"), ("z", 0, "Empty")]
    assert listed(monkeypatch, capsys, "txn", "--longer-than", "1s")[:2] == (0, ["TRANSACTIONAL", "x"])
    assert listed(monkeypatch, capsys, "txn")[1] == ["TRANSACTIONAL", "x", "y", "z"]


def test_groups_are_listed_without_one_whose_coordinator_is_just_changing(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.groups = [
        ("host1:9092", "a", 0),
        ("host1:9092", "b", NOT_COORDINATOR),
        ("host1:9092", "c", NOT_COORDINATOR),
        ("host2:9092", "b", 0),
    ]
    assert listed(monkeypatch, capsys, "group") == (
        0,
        ["a", "b"],
        "mqd: 1 group is left out (c): coordinators are changing; try again\n",
    )


def test_unread_records_are_unknown_while_a_group_cannot_be_described(world: World) -> None:
    world.groups = [("host1:9092", "a", NOT_COORDINATOR)]
    with Cluster("host1:9092") as cluster:
        state = retiring.request(cluster.bootstrap_broker, "t", 0, retiring.STATUS)
        assert "group a" in retiring.groups_behind(cluster, state).error


def test_none_is_aborted_by_partition_while_a_coordinator_is_unavailable(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mqd.cli import main

    monkeypatch.setenv("MQD_BOOTSTRAP", "host1:9092")
    world.leaders[TRANSACTIONS_TOPIC] = [1, -1]
    assert main._run(["txn", "abort", "t", "0", "41", "--execute"]) == 1
    assert "coordinators are unavailable" in capsys.readouterr().err
    assert not any(isinstance(request, WriteTxnMarkersRequest) for request in world.requested)


def test_producers_of_retired_partitions_are_kept_while_a_coordinator_is_unavailable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, bool]] = []
    states = iter([([1, -1], 0), ([1, 2], int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)), ([1, 2], 0), ([1, 2], 0)])

    def onward(_seconds: float = 0) -> None:
        world.leaders[OFFSETS_TOPIC], world.groups_error = next(states)

    monkeypatch.setattr(retiring, "time", SimpleNamespace(sleep=onward))
    onward()
    with Cluster("host1:9092") as cluster:
        state, readers = retiring.wait(
            cluster, "t", retiring.REDIRECTED, lambda state, readers: looks.append((world.step, bool(readers.error)))
        )
    assert looks == [
        (retiring.SEALED, True),
        (retiring.SEALED, True),
        (retiring.REDIRECTED, False),
        (retiring.REDIRECTED, False),
    ]
    assert state.step == retiring.REDIRECTED and readers == retiring.Readers()


@pytest.mark.parametrize("state", ["PrepareCommit", "PrepareAbort"])
def test_a_transaction_that_is_decided_cannot_be_aborted_at_its_offset(world: World, state: str) -> None:
    world.known = [("x", 0, state)]
    with Cluster("host1:9092") as cluster, pytest.raises(CliError, match=f"x is decided .{state}"):
        txns.find_open_transaction(cluster, "t", 0, 41, None)
    world.known = [("x", 0, "Ongoing")]
    with Cluster("host1:9092") as cluster:
        assert txns.find_open_transaction(cluster, "t", 0, 41, None)[0].producer_id == PRODUCER
