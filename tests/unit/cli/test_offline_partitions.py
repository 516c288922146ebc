"""`mqd cluster status` for partitions without a leader: the host and the log directory of the
replica that cannot be served.
"""

import threading
from types import SimpleNamespace

import pytest

from mqd.acceptor.handlers.cluster import describe_log_dirs
from mqd.cli import client_security
from mqd.cli import offline_replicas as offline
from mqd.cli.common import CliError
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import DescribeLogDirsRequest, DescribeLogDirsResponse, MetadataResponse
from mqd.security.client import ClientSecurity


def directory(path: str, error: int = 0, **partitions: int) -> DescribeLogDirsResponse.Result:
    topics = [
        DescribeLogDirsResponse.Topic(name=name, partitions=[DescribeLogDirsResponse.Partition(partition_index=index)])
        for name, index in partitions.items()
    ]
    return DescribeLogDirsResponse.Result(error_code=error, log_dir=path, topics=topics)


FAILED = int(ErrorCode.KAFKA_STORAGE_ERROR)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[DescribeLogDirsResponse.Result]]:
    """Address -> its log directories."""
    found: dict[str, list[DescribeLogDirsResponse.Result]] = {}

    class Broker:
        def __init__(self, address: str, timeout_s: float = 0) -> None:
            if address not in found:
                raise CliError("cannot be reached")
            self.results, self.timeout_s = found[address], timeout_s

        def __enter__(self) -> "Broker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def request(self, api_key: int, request: object) -> object:
            if isinstance(request, DescribeLogDirsRequest):
                assert request.topics and self.timeout_s == offline.DIRECTORIES_TIMEOUT_S
            partitions = [
                MetadataResponse.Partition(partition_index=index, leader_id=leader, replica_nodes=[1, 2])
                for index, leader in ((0, -1), (1, 1), (2, -1))
            ]
            return SimpleNamespace(
                results=self.results, controller_id=1, topics=[MetadataResponse.Topic(name="t", partitions=partitions)]
            )

    monkeypatch.setattr(offline, "Broker", Broker)
    return found


def test_host_and_directory_of_each_are_named(hosts) -> None:
    hosts["a:1"] = [directory("/d1", t=0), directory("/d2", FAILED)]
    hosts["b:1"] = [directory("/d3"), directory("/d4", FAILED), directory("/d5", FAILED)]
    found = offline.offline_replicas([("t", 0, (1, 3)), ("u", 4, (2, 9))], {1: "a:1", 2: "b:1", 3: "c:1"})
    assert found == [
        offline.OfflineReplica("t-0", 1, ("/d1",)),
        offline.OfflineReplica("t-0", 3, ()),
        offline.OfflineReplica("u-4", 2, ("/d4", "/d5"), True),
    ]
    assert [place.text() for place in found] == [
        "t-0 is not served by node 1, which is in service: log directory /d1",
        "t-0 is not served by node 3, which is in service: its log directories are not known",
        "u-4 is not served by node 2, which is in service: log directory /d4 or /d5, which cannot be used",
    ]


def test_hosts_are_queried_once_and_only_if_a_partition_has_no_leader(hosts) -> None:
    assert offline.offline_replicas([], {1: "a:1"}) == []
    hosts["a:1"] = [directory("/d1", FAILED)]
    found = offline.offline_replicas([("t", index, (1,)) for index in range(offline.SHOWN_MAX + 5)], {1: "a:1"})
    assert len(found) == offline.SHOWN_MAX and found[0].directories == ("/d1",)


def test_one_broker_reports_only_its_own_partitions(hosts) -> None:
    """For `mqd status`, which never waits for long, and prints nothing without a response."""
    assert offline.offline_replicas_of("127.0.0.1", 1) == []
    hosts["127.0.0.1:1"] = [directory("/d1", t=0), directory("/d2", FAILED)]
    found = offline.offline_replicas_of("0.0.0.0", 1)
    assert [(place.partition, place.node, place.directories) for place in found] == [
        ("t-0", 1, ("/d1",)),
        ("t-2", 1, ("/d2",)),
    ]


@pytest.mark.parametrize(
    ("host", "address"), [("::1", "[::1]:1"), ("fd00::2", "[fd00::2]:1"), ("::", "127.0.0.1:1"), ("b", "b:1")]
)
def test_one_broker_is_queried_at_its_address(hosts, host: str, address: str) -> None:
    hosts[address] = [directory("/d1", t=0)]
    assert [place.directories for place in offline.offline_replicas_of(host, 1)] == [("/d1",), ()]


def test_a_slow_host_delays_no_other_and_only_missing_partitions_are_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """For others, the sizes of all partitions would have to be measured."""
    together, requested = threading.Barrier(3), {}

    class Broker:
        def __init__(self, address: str, timeout_s: float) -> None:
            self.address = address

        def __enter__(self) -> "Broker":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def request(self, api_key: int, request: DescribeLogDirsRequest) -> object:
            requested[self.address] = [(topic.topic, topic.partitions) for topic in request.topics or []]
            together.wait(20)
            return SimpleNamespace(results=[directory("/d", FAILED)])

    monkeypatch.setattr(offline, "Broker", Broker)
    found = offline.offline_replicas(
        [("t", 0, (1, 2)), ("t", 3, (1,)), ("u", 4, (3, 2))], {1: "a:1", 2: "b:1", 3: "c:1"}
    )
    assert [(one.partition, one.node) for one in found] == [("t-0", 1), ("t-0", 2), ("t-3", 1), ("u-4", 3), ("u-4", 2)]
    assert requested == {"a:1": [("t", [0, 3])], "b:1": [("t", [0]), ("u", [4])], "c:1": [("u", [4])]}


def test_requests_to_a_host_carry_the_users_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the threads that query all hosts in parallel."""
    users = []
    monkeypatch.setattr(
        offline,
        "log_directories",
        lambda *_: users.append(client_security.current().settings.get("sasl.username")) or [],
    )
    with client_security.acting_as(ClientSecurity({"sasl.username": "bob"})):
        offline.offline_replicas([("t", 0, (1, 2))], {1: "a:1", 2: "b:1"})
    assert users == ["bob", "bob"]


def test_a_hung_directory_is_awaited_until_its_broker_reports_it() -> None:
    assert describe_log_dirs.RESPONSE_TIMEOUT_S < offline.DIRECTORIES_TIMEOUT_S
