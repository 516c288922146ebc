"""`mqd topic reassign`: a plan belongs to one topic, and is verified partition by partition. With a
fake cluster.
"""

import contextlib
import json
from pathlib import Path

import pytest

from mqd.cli import kafka_request as request
from mqd.cli import main as main_module
from mqd.cli import moves
from mqd.cli import offline_replicas as offline
from mqd.cli.common import CliError
from mqd.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ListPartitionReassignmentsResponse,
    MetadataRequest,
    MetadataResponse,
)

NODES = (1, 2, 3, 4)
UNKNOWN_TOPIC = 3


class FakeCluster:
    """Topics -> partitions -> replicas, and current moves: (adding, removing) by topic and
    partition. `bytes_at`: of one partition on one host; a host that is not in `reachable` does not
    respond.
    """

    def __init__(self) -> None:
        self.topics = {"big": [[1, 2], [2, 3], [3, 1]], "racked": [[1, 2]]}
        self.moving: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self.bytes_at: dict[tuple[str, int, int], int] = {}
        self.reachable = set(NODES)
        self.racks: dict[int, str] = {}
        self.moves_requested: list[tuple[str, int]] = []
        self.balanced: list[int] = []  # the target of balancing for racked-0
        self.balanced_big: dict[int, list[int]] = {}  # and for partitions of big
        self.balances = False  # immediately
        self.is_mqd = True

    def metadata(self, requested: MetadataRequest) -> MetadataResponse:
        topics = []
        for name in self.topics if requested.topics is None else [topic.name for topic in requested.topics]:
            partitions = [
                MetadataResponse.Partition(
                    partition_index=index, leader_id=replicas[0], replica_nodes=replicas, isr_nodes=replicas
                )
                for index, replicas in enumerate(self.topics.get(name, ()))
            ]
            topics.append(
                MetadataResponse.Topic(
                    name=name, partitions=partitions, error_code=0 if name in self.topics else UNKNOWN_TOPIC
                )
            )
        brokers = [MetadataResponse.Broker(node_id=node, host=f"h{node}", port=9) for node in NODES]
        return MetadataResponse(topics=topics, brokers=brokers)

    def reassignments(self) -> ListPartitionReassignmentsResponse:
        one = ListPartitionReassignmentsResponse.OngoingPartitionReassignment
        topics = [
            ListPartitionReassignmentsResponse.OngoingTopicReassignment(
                name=name,
                partitions=[
                    one(
                        partition_index=index,
                        replicas=self.topics[name][index],
                        adding_replicas=adding,
                        removing_replicas=removing,
                    )
                ],
            )
            for (name, index), (adding, removing) in self.moving.items()
        ]
        return ListPartitionReassignmentsResponse(topics=topics)

    def log_dirs(self, node: int, requested: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
        topics = [
            DescribeLogDirsResponse.Topic(
                name=topic.topic,
                partitions=[
                    DescribeLogDirsResponse.Partition(
                        partition_index=index, partition_size=self.bytes_at.get((topic.topic, index, node), 0)
                    )
                    for index in topic.partitions
                ],
            )
            for topic in requested.topics
        ]
        return DescribeLogDirsResponse(results=[DescribeLogDirsResponse.Result(log_dir="/d", topics=topics)])

    def alter(self, requested: AlterPartitionReassignmentsRequest) -> AlterPartitionReassignmentsResponse:
        if requested.balance:
            plan = {"racked": {0: self.balanced} if self.balanced else {}, "big": self.balanced_big}
            if self.balances and requested.balance == 1:
                for name, targets in plan.items():
                    for index, replicas in targets.items():
                        self.topics[name][index] = replicas
            one = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse
            return AlterPartitionReassignmentsResponse(
                responses=[
                    AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                        name=name,
                        partitions=[one(partition_index=index, target=replicas) for index, replicas in targets.items()],
                    )
                    for name, targets in plan.items()
                ]
            )
        self.moves_requested += [
            (topic.name, one.partition_index) for topic in requested.topics for one in topic.partitions
        ]
        return AlterPartitionReassignmentsResponse()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()

    class Broker:
        def __init__(self, address: str, timeout_s: float = 0) -> None:
            self.node = int(address[1 : address.index(":")]) if address.startswith("h") else 1
            if self.node not in cluster.reachable:
                raise CliError("cannot be reached")

        def __enter__(self) -> "Broker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def is_mqd(self) -> bool:
            return cluster.is_mqd

        def request(self, api_key: int, requested: object) -> object:
            match requested:
                case MetadataRequest():
                    return cluster.metadata(requested)
                case DescribeLogDirsRequest():
                    return cluster.log_dirs(self.node, requested)
                case DescribeClusterRequest():
                    assert requested.include_fenced_brokers, "a host that is away has its rack all the same"
                    return DescribeClusterResponse(
                        brokers=[
                            DescribeClusterResponse.Broker(broker_id=node, rack=cluster.racks.get(node))
                            for node in NODES
                        ]
                    )
                case AlterPartitionReassignmentsRequest():
                    return cluster.alter(requested)
            return cluster.reassignments()

    monkeypatch.setattr(request, "Broker", Broker)
    monkeypatch.setattr(offline, "Broker", Broker)
    return cluster


@pytest.fixture
def mqd(capsys: pytest.CaptureFixture[str]):
    """mqd("big", ...) -> (exit status, output, errors) of `mqd topic reassign`, or of another
    command.
    """

    def call(*arguments: str, command: tuple[str, ...] = ("topic", "reassign")) -> tuple[int, str, str]:
        code = main_module._run([*command, *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def plan(tmp_path: Path, *partitions: tuple[str, int, list[int]]) -> str:
    file = tmp_path / "plan.json"
    file.write_text(
        json.dumps(
            {
                "version": 1,
                "partitions": [
                    {"topic": topic, "partition": index, "replicas": replicas} for topic, index, replicas in partitions
                ],
            }
        )
    )
    return str(file)


# -- a plan is one topic's -------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), ("--dry-run",), ("--no-wait",)])
def test_a_plan_of_another_topic_is_refused_and_nothing_moves(
    mqd, played: FakeCluster, tmp_path: Path, how: tuple[str, ...]
) -> None:
    code, output, error = mqd("big", "--plan", plan(tmp_path, ("big", 0, [1, 2]), ("racked", 0, [2, 3])), *how)
    assert (code, output, played.moves_requested) == (1, "", [])
    assert "racked-0" in error and "big-0" not in error and "mqd topic reassign racked --plan FILE" in error


def test_a_plan_that_names_no_partition_is_refused(mqd, played: FakeCluster, tmp_path: Path) -> None:
    code, _, error = mqd("big", "--plan", plan(tmp_path))
    assert code == 1 and "lists no partition" in error


def test_a_plan_of_the_topic_is_carried_out(mqd, played: FakeCluster, tmp_path: Path) -> None:
    file = plan(tmp_path, ("big", 0, [1, 2]), ("big", 2, [3, 1]))
    assert mqd("big", "--plan", file) == (0, "topic big: 2 partitions moved\n", "")
    assert played.moves_requested == [("big", 0), ("big", 2)]


# -- whether it was carried out --------------------------------------------------------------------


def test_a_plan_is_verified_by_partition(mqd, played: FakeCluster, tmp_path: Path) -> None:
    played.topics["big"] = [[1, 2], [3, 4, 2], [3, 1]]
    played.moving["big", 1] = ([3, 4], [2])
    played.bytes_at = {("big", 1, 3): 1_000, ("big", 1, 4): 260}
    file = plan(tmp_path, ("big", 0, [1, 2]), ("big", 1, [3, 4]), ("big", 2, [1, 2]), ("big", 7, [1, 2]))
    code, output, _ = mqd("big", "--plan", file, "--status")
    assert code == 1 and played.moves_requested == []
    assert [line.split() for line in output.splitlines()] == [
        ["PARTITION", "STATE", "PLANNED", "REPLICAS", "COPIED"],
        ["0", "done", "1,2", "1,2", "-"],
        ["1", "under", "way", "3,4", "3,4,2", "63%"],
        ["2", "not", "done", "1,2", "3,1", "-"],
        ["7", "not", "done", "1,2", "-", "-"],
        *[
            line.split()
            for line in [
                "topic big, 4 partitions: 1 done, 1 under way, 2 not done (carry the plan out again for these)"
            ]
        ],
    ]
    found = json.loads(mqd("big", "--plan", file, "--status", "--format", "json")[1])
    assert [one["state"] for one in found] == ["done", "under_way", "not_done", "not_done"]
    assert found[1] == {
        "topic": "big",
        "partition": 1,
        "state": "under_way",
        "planned": [3, 4],
        "replicas": [3, 4, 2],
        "adding": [3, 4],
        "removing": [2],
        "copied_bytes": 1_260,
        "total_bytes": 2_000,
    }


def test_verifying_succeeds_only_when_the_plan_is_complete(mqd, played: FakeCluster, tmp_path: Path) -> None:
    file = plan(tmp_path, ("big", 0, [1, 2]), ("big", 1, [2, 3]))
    assert (found := mqd("big", "--plan", file, "--status"))[0] == 0 and found[1].endswith(
        "topic big: the plan is complete\n"
    )
    assert mqd("big", "--plan", file, "--status", "--format", "json")[0] == 0
    played.topics["big"][0], played.moving["big", 0] = [1, 2, 3], ([], [3])
    assert (found := mqd("big", "--plan", file, "--status"))[0] == 1 and "2 partitions: 1 done, 1 under way\n" in found[
        1
    ]


def test_moves_that_differ_from_the_plan_are_shown_as_such(mqd, played: FakeCluster, tmp_path: Path) -> None:
    played.topics["big"][0], played.moving["big", 0] = [4, 2, 1], ([4], [1])
    file = plan(tmp_path, ("big", 0, [1, 3]), ("big", 1, [3, 2]))
    assert [one["state"] for one in json.loads(mqd("big", "--plan", file, "--status", "--format", "json")[1])] == [
        "not_done",
        "not_done",
    ]


def test_progress_is_unknown_while_a_host_does_not_respond(mqd, played: FakeCluster, tmp_path: Path) -> None:
    played.topics["big"][1], played.moving["big", 1] = [3, 4, 2], ([3, 4], [2])
    played.bytes_at = {("big", 1, 3): 1_000, ("big", 1, 4): 1_000}
    played.reachable = {1, 2, 3}
    code, output, _ = mqd("big", "--plan", plan(tmp_path, ("big", 1, [3, 4])), "--status")
    assert code == 1 and output.splitlines()[1].split() == ["1", "under", "way", "3,4", "3,4,2", "-"]


@pytest.mark.parametrize(
    "arguments", [("--brokers", "1", "--status"), ("--cancel", "--status"), ("--plan", "FILE", "--cancel"), ()]
)
def test_options_that_exclude_each_other_are_a_usage_error(
    mqd, played: FakeCluster, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = plan(tmp_path, ("big", 0, [1, 2]))
    assert mqd("big", *(file if word == "FILE" else word for word in arguments))[0] == 2


def test_a_plan_of_another_topic_is_not_verified_under_this_name(mqd, played: FakeCluster, tmp_path: Path) -> None:
    code, _, error = mqd("big", "--plan", plan(tmp_path, ("racked", 0, [1, 2])), "--status")
    assert code == 1 and "racked-0" in error


# -- a balance -------------------------------------------------------------------------------------


def test_a_balance_without_waiting_names_the_command_that_completes_it(mqd, played: FakeCluster) -> None:
    played.balanced = [3, 4]
    code, output, _ = mqd("--no-wait", command=("cluster", "balance"))
    assert (
        code == 0
        and output.startswith("1 partition to move\n")
        and "another controller becomes active" in output
        and "mqd cluster balance" in output
    )


def test_an_interrupted_balance_names_the_command_that_continues_it(
    mqd, played: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "STALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(moves, "POLL_S", 0.001)
    played.balanced = [3, 4]
    code, _, error = mqd(command=("cluster", "balance"))
    assert code == 1 and "racked-0" in error and "mqd cluster balance again" in error
    code, _, error = mqd("racked", "--brokers", "3,4")
    assert code == 1 and "racked-0" in error and "it was cancelled" in error and "balance" not in error


def test_a_balance_distinguishes_moves_from_leader_changes(mqd, played: FakeCluster) -> None:
    """racked-0 and big-0 get other replicas; big-1 has the same in another order, so nothing is
    copied.
    """
    played.balanced, played.balanced_big, played.balances = [3, 4], {0: [1, 4], 1: [3, 2]}, True
    code, output, _ = mqd("--dry-run", command=("cluster", "balance"))
    assert code == 0
    assert output.splitlines()[-2:] == ["2 partitions would move", "1 partition would get another preferred leader"]
    code, output, _ = mqd(command=("cluster", "balance"))
    assert (code, output) == (0, "2 partitions moved\n1 partition got another preferred leader\n")
    played.balanced, played.balanced_big = [], {0: [4, 1]}
    assert mqd(command=("cluster", "balance"))[1] == "1 partition got another preferred leader\n"
    played.balanced_big = {}
    assert mqd(command=("cluster", "balance"))[1] == "balanced already; nothing moves\n"


def test_a_changed_preferred_leader_is_awaited(mqd, played: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "STALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(moves, "POLL_S", 0.001)
    played.balanced_big = {1: [3, 2]}  # the controller never carries it out
    code, _, error = mqd(command=("cluster", "balance"))
    assert code == 1 and "big-1" in error


def test_partitions_that_the_next_plan_moves_again_count_as_done(
    mqd, played: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "STALL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(moves, "POLL_S", 0.001)
    played.balanced, played.balanced_big, played.balances = [3, 4], {1: [3, 2]}, True
    played.moving = {("racked", 0): ([3, 4], [1, 2])}
    reassignments, looks = played.reassignments, iter(range(9))

    def advance() -> ListPartitionReassignmentsResponse:
        if next(looks) == 1:  # big-1 was seen where the first plan wants it
            played.moving, played.topics["big"][1] = {}, [2, 3]
        return reassignments()

    played.reassignments = advance  # type: ignore[method-assign]
    assert mqd(command=("cluster", "balance"))[0] == 0


def test_a_balance_that_needs_another_plan_says_so(mqd, played: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqd.cluster.metadata.rules.placement.BALANCE_MOVES_MAX", 2)
    played.balanced, played.balances = [3, 4], True
    assert "a plan has 2 moves at most" in mqd(command=("cluster", "balance"))[1]
    played.balanced = [3, 2]
    assert "at most" not in mqd(command=("cluster", "balance"))[1]


def test_the_progress_bar_counts_moves_done_before_the_first_poll(
    mqd, played: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([{("t", 0)}, set()])
    seen = []
    monkeypatch.setattr(moves, "POLL_S", 0)
    monkeypatch.setattr(
        moves, "_progress_display", lambda doing, total: contextlib.nullcontext(lambda n: seen.append((n, total)))
    )
    moves._watch("moving", lambda: next(looks), moves._StallCheck(None, str), True, 3)  # type: ignore[arg-type]
    assert seen == [(2, 3), (3, 3)]


# -- where replicas go -----------------------------------------------------------------------------


def spread(
    current: list[list[int]], brokers: list[int], factor: int | None = None, racks: dict[int, str] | None = None
) -> list[list[int]]:
    return list(
        moves.spread(
            {("t", index): replicas for index, replicas in enumerate(current)}, brokers, factor, racks or {}
        ).values()
    )


def test_replicas_stay_if_possible_and_others_go_to_the_emptiest_hosts() -> None:
    assert spread([[1, 2], [2, 3], [3, 1]], [1, 2, 3]) == [[1, 2], [2, 3], [3, 1]]
    assert spread([[1, 2], [2, 3], [3, 1]], [2, 3, 4]) == [[2, 4], [3, 2], [4, 3]]
    assert spread([[1, 2, 3]], [1, 2, 3], 1) == [[1]]
    with pytest.raises(CliError, match="3 replicas need as many brokers"):
        spread([[1]], [1, 2], 3)


def test_replicas_go_to_other_racks_first() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    for replicas in spread([[1], [1], [2], [3]], [1, 2, 3, 4], 2, racks):
        assert {racks[node] for node in replicas} == {"a", "b"}, replicas
    assert spread([[1, 3], [2, 4]], [1, 2, 3, 4], None, racks) == [[1, 3], [2, 4]], (
        "what is spread over the racks stays"
    )


def test_a_second_replica_in_a_rack_stays_only_without_other_racks() -> None:
    racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    ((first, second),) = spread([[1, 2]], [1, 2, 3, 4], None, racks)
    assert first == 1 and second in (3, 4)
    assert spread([[1, 2]], [1, 2], None, racks) == [[1, 2]]
    assert spread([[3, 4, 1]], [1, 2, 3, 4], 2, racks) == [[3, 1]], (
        "one that is given up is one of two in the same rack"
    )
    one_and_three = {1: "a", 2: "b", 3: "b", 4: "b", 5: "b"}
    assert sorted(spread([[2, 3, 4, 1]], [1, 2, 3, 4, 5], None, one_and_three)[0]) == [1, 2, 3, 4], (
        "nothing is copied that gains nothing"
    )


def test_new_replicas_are_spread_evenly_within_the_racks() -> None:
    racks = {1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    found = spread([[1]] * 4, [1, 2, 3, 4, 5], 3, racks)
    assert all({racks[node] for node in replicas} == {"a", "b", "c"} for replicas in found)
    assert [sum(node in replicas for replicas in found) for node in (1, 2, 3, 4, 5)] == [4, 2, 2, 2, 2]


def test_the_command_fetches_the_racks(mqd, played: FakeCluster) -> None:
    played.racks = {1: "a", 2: "a", 3: "b", 4: "b"}
    code, output, _ = mqd("racked", "--brokers", "1,2,3", "--dry-run")
    assert code == 0 and json.loads(output)["partitions"] == [{"topic": "racked", "partition": 0, "replicas": [1, 3]}]


@pytest.mark.parametrize("command", [("cluster", "balance"), ("cluster", "drain", "2")])
def test_drains_are_not_requested_from_other_clusters(mqd, played: FakeCluster, command: tuple) -> None:
    """It would receive a request to unregister the node, without a drain."""
    played.is_mqd = False
    code, _, error = mqd(command=command)
    assert code == 1 and "only an mqd cluster" in error and "mqd topic reassign" in error
