"""OffsetCommits pipelined on one connection while the acceptor is killed: the group ends at the
last successful commit, never at an older one.

The broker resends pending commits to the new acceptor. A commit that is executed twice is harmless
if the newer ones of its connection are executed after it. The order itself is tested by
native/tests/server/test_reactor_parked.c: here most resent commits reach a coordinator that is
still loading.
"""

from __future__ import annotations

import os
import random
import signal

import pytest

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FindCoordinatorRequest, OffsetCommitRequest, OffsetFetchRequest
from tests.broker import Broker, pause
from tests.crash.processes import wait_until_healthy
from tests.crash.workload import create_topics
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, API_VERSIONS = 8, 9, 10, 18
TOPIC = "commits"
GROUPS, PIPELINED = 4, 12
LOADING = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}


class Committer:
    """One group on its own connection; every commit is one higher than the last."""

    def __init__(self, broker: Broker, group: str) -> None:
        self.kafka = KafkaConnection("127.0.0.1", broker.port, timeout_s=30)
        self.group = group
        self.sent = 0
        self.unanswered: list[int] = []
        self.committed = -1

    def send(self, count: int) -> None:
        for _ in range(count):
            self.sent += 1
            partition = OffsetCommitRequest.Partition(
                partition_index=0, committed_offset=self.sent, committed_metadata=""
            )
            topic = OffsetCommitRequest.Topic(name=TOPIC, partitions=[partition])
            self.kafka.send(
                OFFSET_COMMIT,
                8,
                OffsetCommitRequest(group_id=self.group, generation_id_or_member_epoch=-1, topics=[topic]),
            )
            self.unanswered.append(self.sent)

    def receive(self, count: int) -> None:
        for _ in range(count):
            error = self.kafka.receive().body.topics[0].partitions[0].error_code
            offset = self.unanswered.pop(0)
            if error == ErrorCode.NONE:
                self.committed = offset
            else:
                assert error in LOADING, error

    def fetched(self) -> int | None:
        """The committed offset, or None while the coordinator loads."""
        topic = OffsetFetchRequest.GroupTopic(name=TOPIC, partition_indexes=[0])
        response = self.kafka.call(
            OFFSET_FETCH, 8, OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id=self.group, topics=[topic])])
        )
        group = response.groups[0]
        if group.error_code in LOADING:
            return None
        assert group.error_code == ErrorCode.NONE
        return group.topics[0].partitions[0].committed_offset


@pytest.mark.timeout(600)
def test_a_killed_acceptor_lowers_no_committed_offset(start_broker, io_backend, rounds, seed) -> None:
    broker = start_broker(config={"io.backend": io_backend, "offsets.topic.num.partitions": "4"})
    create_topics(broker.bootstrap, {TOPIC: 1})
    chance = random.Random(f"{seed} commits")
    committers = [Committer(broker, f"group-{number}") for number in range(GROUPS)]
    for one in committers:
        # creates the internal topic
        one.kafka.call(FIND_COORDINATOR, 4, FindCoordinatorRequest(coordinator_keys=[one.group]))
        eventually(lambda one=one: one.fetched() is not None, broker.logs)
    witnesses = [KafkaConnection("127.0.0.1", broker.port) for _ in range(4)]
    for number in range(rounds(3, 60)):
        for one in committers:
            one.send(chance.randint(1, PIPELINED))
        # some responses are read first: entries of the worker's request table are reused in another
        # order
        for one in committers:
            one.receive(chance.randint(0, len(one.unanswered) // 2))
        before = broker.pid("mqd-acceptor")
        pause(before)  # it has these, without a response, when it dies
        for one in committers:
            one.send(chance.randint(1, PIPELINED))
        for witness in witnesses:  # the workers have read what was sent before
            assert witness.call(API_VERSIONS, 3).error_code == 0
        os.kill(before, signal.SIGKILL)
        for one in committers:
            one.send(chance.randint(1, PIPELINED))
        wait_until_healthy(broker, {"mqd-acceptor": before})
        for one in committers:
            one.receive(len(one.unanswered))
            eventually(lambda one=one: one.fetched() is not None, broker.logs)
            # higher than the last successful one: the dead acceptor executed a commit that its
            # successor, still loading, refused
            assert one.fetched() >= one.committed, f"round {number}, {one.group}: commits 1 to {one.sent} were sent"
    assert all(one.committed > 0 for one in committers), "no commit ever succeeded"
