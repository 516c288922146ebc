"""`mqd topic reassign`: a plan is one topic's, and is verified partition by partition. Against a cluster that is played here."""

import json
from pathlib import Path

import pytest

from mqd.cli import main as main_module
from mqd.cli import request
from mqd.cli.common import CliError
from mqd.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ListPartitionReassignmentsResponse,
    MetadataRequest,
    MetadataResponse,
)

NODES = (1, 2, 3, 4)
UNKNOWN_TOPIC = 3


class PlayedCluster:
    """Topics -> partitions -> replicas, and what moves: (adding, removing) by topic and partition. `bytes_at`: of one partition on one host; a host that is not in `reachable` does not answer."""

    def __init__(self) -> None:
        self.topics = {"big": [[1, 2], [2, 3], [3, 1]], "racked": [[1, 2]]}
        self.moving: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self.bytes_at: dict[tuple[str, int, int], int] = {}
        self.reachable = set(NODES)
        self.racks: dict[int, str] = {}
        self.asked_to_move: list[tuple[str, int]] = []

    def metadata(self, asked: MetadataRequest) -> MetadataResponse:
        topics = []
        for name in self.topics if asked.topics is None else [topic.name for topic in asked.topics]:
            partitions = [
                MetadataResponse.Partition(partition_index=index, leader_id=replicas[0], replica_nodes=replicas, isr_nodes=replicas) for index, replicas in enumerate(self.topics.get(name, ()))
            ]
            topics.append(MetadataResponse.Topic(name=name, partitions=partitions, error_code=0 if name in self.topics else UNKNOWN_TOPIC))
        brokers = [MetadataResponse.Broker(node_id=node, host=f"h{node}", port=9, rack=self.racks.get(node)) for node in NODES]
        return MetadataResponse(topics=topics, brokers=brokers)

    def reassignments(self) -> ListPartitionReassignmentsResponse:
        one = ListPartitionReassignmentsResponse.OngoingPartitionReassignment
        topics = [
            ListPartitionReassignmentsResponse.OngoingTopicReassignment(
                name=name, partitions=[one(partition_index=index, replicas=self.topics[name][index], adding_replicas=adding, removing_replicas=removing)]
            )
            for (name, index), (adding, removing) in self.moving.items()
        ]
        return ListPartitionReassignmentsResponse(topics=topics)

    def log_dirs(self, node: int, asked: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
        topics = [
            DescribeLogDirsResponse.Topic(
                name=topic.topic, partitions=[DescribeLogDirsResponse.Partition(partition_index=index, partition_size=self.bytes_at.get((topic.topic, index, node), 0)) for index in topic.partitions]
            )
            for topic in asked.topics
        ]
        return DescribeLogDirsResponse(results=[DescribeLogDirsResponse.Result(log_dir="/d", topics=topics)])

    def alter(self, asked: AlterPartitionReassignmentsRequest) -> AlterPartitionReassignmentsResponse:
        self.asked_to_move += [(topic.name, one.partition_index) for topic in asked.topics for one in topic.partitions]
        return AlterPartitionReassignmentsResponse()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedCluster:
    cluster = PlayedCluster()

    class Broker:
        def __init__(self, address: str, timeout_s: float = 0) -> None:
            self.node = int(address[1 : address.index(":")]) if address.startswith("h") else 1
            if self.node not in cluster.reachable:
                raise CliError("cannot be reached")

        def __enter__(self) -> "Broker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, api_key: int, asked: object) -> object:
            match asked:
                case MetadataRequest():
                    return cluster.metadata(asked)
                case DescribeLogDirsRequest():
                    return cluster.log_dirs(self.node, asked)
                case AlterPartitionReassignmentsRequest():
                    return cluster.alter(asked)
            return cluster.reassignments()

    monkeypatch.setattr(request, "Broker", Broker)
    return cluster


@pytest.fixture
def mqd(capsys: pytest.CaptureFixture[str]):
    """mqd("topic", ...) -> (exit status, output, errors)"""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main_module._run(["topic", "reassign", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def plan(tmp_path: Path, *partitions: tuple[str, int, list[int]]) -> str:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": index, "replicas": replicas} for topic, index, replicas in partitions]}))
    return str(file)


# -- a plan is one topic's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), ("--dry-run",), ("--no-wait",)])
def test_a_plan_of_another_topic_is_refused_and_nothing_moves(mqd, played: PlayedCluster, tmp_path: Path, how: tuple[str, ...]) -> None:
    code, said, error = mqd("big", "--plan", plan(tmp_path, ("big", 0, [1, 2]), ("racked", 0, [2, 3])), *how)
    assert (code, said, played.asked_to_move) == (1, "", [])
    assert "racked-0" in error and "big-0" not in error and "mqd topic reassign racked --plan FILE" in error


def test_a_plan_that_names_no_partition_is_refused(mqd, played: PlayedCluster, tmp_path: Path) -> None:
    code, _, error = mqd("big", "--plan", plan(tmp_path))
    assert code == 1 and "names no partition" in error


def test_a_plan_of_the_topic_is_carried_out(mqd, played: PlayedCluster, tmp_path: Path) -> None:
    file = plan(tmp_path, ("big", 0, [1, 2]), ("big", 2, [3, 1]))
    assert mqd("big", "--plan", file) == (0, "topic big: 2 partitions moved\n", "")
    assert played.asked_to_move == [("big", 0), ("big", 2)]
