"""`mqd cluster status` about voters: which have not fetched lately or lag behind, and how many more
may be lost.
"""

import json

import pytest

from mqd.cli import kafka_request as request
from mqd.cli import main as main_module
from mqd.cli import voters
from mqd.protocol.messages import (
    DescribeClusterResponse,
    DescribeConfigsResponse,
    DescribeQuorumResponse,
    MetadataResponse,
)

NOW_MS = 1_700_000_000_000  # by the leader's clock; no other is used


def replica(
    node: int, fetched_ago_ms: int | None = 0, caught_up_ago_ms: int | None = 0, log_end_offset: int = 10
) -> DescribeQuorumResponse.ReplicaState:
    fetched, caught_up = (-1 if ago is None else NOW_MS - ago for ago in (fetched_ago_ms, caught_up_ago_ms))
    return DescribeQuorumResponse.ReplicaState(
        replica_id=node, log_end_offset=log_end_offset, last_fetch_timestamp=fetched, last_caught_up_timestamp=caught_up
    )


def quorum(
    *replicas: DescribeQuorumResponse.ReplicaState,
    observers: tuple[DescribeQuorumResponse.ReplicaState, ...] = (),
    fetch_timeout_ms: int = 2_000,
) -> DescribeQuorumResponse.PartitionData:
    return DescribeQuorumResponse.PartitionData(
        leader_id=1,
        leader_epoch=3,
        high_watermark=10,
        current_voters=list(replicas),
        observers=list(observers),
        fetch_timeout_ms=fetch_timeout_ms,
    )


def seen(partition: DescribeQuorumResponse.PartitionData) -> tuple[list[int], list[int], int]:
    found = voters.voter_status(partition)
    return found.silent, found.behind, found.losses_allowed


def test_a_silent_voter_does_not_count() -> None:
    """It fetched in this epoch, which does not mean that it still does."""
    assert seen(quorum(replica(1), replica(2, 500, 500), replica(3, 30_409, 30_409))) == ([3], [], 0)
    assert seen(quorum(replica(1), replica(2, 500, 500), replica(3, None, None, -1))) == ([3], [], 0), (
        "never heard of in this epoch"
    )
    assert seen(quorum(*map(replica, (1, 2, 3)))) == ([], [], 1)
    assert seen(quorum(replica(1), replica(2), replica(3), replica(4), replica(5, 6_000, 6_000))) == ([5], [], 1)
    assert seen(quorum(replica(1))) == ([], [], 0)
    assert seen(quorum(replica(1), replica(2))) == ([], [], 0)


def test_a_voter_that_lags_behind_does_not_count() -> None:
    """For example with a full disk: it lacks all records committed lately."""
    assert seen(quorum(replica(1), replica(2, 100, 6_000), replica(3))) == ([], [2], 0)
    assert seen(quorum(replica(1), replica(2, 100, None, -1), replica(3))) == ([], [2], 0)


def test_the_silence_limit_follows_from_the_fetch_interval() -> None:
    assert seen(quorum(replica(1), replica(2, 4_900, 4_900), replica(3), fetch_timeout_ms=200)) == ([], [], 1), (
        "a busy host is not called lost"
    )
    assert seen(quorum(replica(1), replica(2, 119_000, 119_000), replica(3), fetch_timeout_ms=60_000)) == ([], [], 1)
    assert seen(quorum(replica(1), replica(2, 121_000, 121_000), replica(3), fetch_timeout_ms=60_000)) == ([2], [], 0)
    assert seen(quorum(replica(1), replica(2, 6_000, 6_000), replica(3), fetch_timeout_ms=0)) == ([2], [], 0), (
        "a leader that does not say it"
    )


def test_a_leader_that_is_no_longer_a_voter_is_not_compared_with() -> None:
    assert seen(quorum(replica(2, 100, 100), replica(3, 30_000, 30_000), observers=(replica(4, 200, 200),))) == (
        [3],
        [],
        0,
    )
    assert seen(quorum()) == ([], [], 0)


@pytest.fixture
def mqd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """mqd(partition, *arguments) -> (exit status, output), with a cluster whose quorum leader
    responds with `partition`. The command line's own clock is years ahead of the leader's.
    """

    def call(partition: DescribeQuorumResponse.PartitionData, *arguments: str) -> tuple[int, str]:
        class Broker:
            def __init__(self, bootstrap: str) -> None:
                pass

            def __enter__(self) -> "Broker":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def request(self, api_key: int, requested: object) -> object:
                responses = {
                    "DescribeClusterRequest": DescribeClusterResponse(
                        cluster_id="c", brokers=[DescribeClusterResponse.Broker(broker_id=1, host="a", port=1)]
                    ),
                    "DescribeQuorumRequest": DescribeQuorumResponse(
                        topics=[
                            DescribeQuorumResponse.TopicData(topic_name="__cluster_metadata", partitions=[partition])
                        ]
                    ),
                    "MetadataRequest": MetadataResponse(),
                    "DescribeConfigsRequest": DescribeConfigsResponse(results=[DescribeConfigsResponse.Result()]),
                }
                return responses[type(requested).__name__]

        monkeypatch.setattr(request, "Broker", Broker)
        code = main_module._run(list(arguments))
        return code, capsys.readouterr().out

    return call


def test_status_names_voters_that_the_leader_does_not_hear(mqd) -> None:
    lost = quorum(replica(1), replica(2, 30_409, 30_409), replica(3, 300, 300))
    code, output = mqd(lost, "cluster", "status")
    assert code == 0 and "voters: 1, 2, 3; not heard from: 2; the quorum can lose none of the others\n" in output
    found = json.loads(mqd(lost, "cluster", "status", "--format", "json")[1])
    assert (found["voters_not_heard_from"], found["voters_behind"], found["voter_losses_tolerated"]) == ([2], [], 0)
    assert (
        "voters: 1, 2, 3; does not keep up: 3; the quorum can lose none of the others\n"
        in mqd(quorum(replica(1), replica(2), replica(3, 0, 9_000)), "cluster", "status")[1]
    )
    assert (
        "voters: 1, 2, 3; the quorum can lose 1 of them\n"
        in mqd(quorum(*map(replica, (1, 2, 3))), "cluster", "status")[1]
    )


def test_status_waits_for_a_voter_that_is_silent(mqd) -> None:
    assert mqd(quorum(*map(replica, (1, 2, 3))), "cluster", "status", "--wait", "0")[0] == 0
    assert mqd(quorum(replica(1), replica(2, 30_409, 30_409), replica(3)), "cluster", "status", "--wait", "0")[0] == 1


def test_controller_shows_ages_by_the_leaders_clock(mqd) -> None:
    output = mqd(quorum(replica(1), replica(2, 30_409, 30_409), replica(3, None, None, -1)), "cluster", "controller")[1]
    assert [line.split()[4:-1] for line in output.splitlines()[2:]] == [
        ["0", "ms", "ago"],
        ["30409", "ms", "ago"],
        ["never"],
    ]
