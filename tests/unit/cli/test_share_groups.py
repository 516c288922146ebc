"""`mqd group` with share groups: its requests, and its output for responses set by the test."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mqd.cli import broker_lookup
from mqd.cli.broker_lookup import EARLIEST
from mqd.cli.verbs.group import command
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E

STARTS, ENDS = {("t", 0): 10, ("t", 1): 0}, {("t", 0): 100, ("t", 1): 50}


class FakeCluster:
    """One broker with one share group, `jobs`, which starts at 40 in t-0 and has no start in t-1."""

    members: list[Any] = []
    requests: list[Any] = []
    error = 0

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap_broker = SimpleNamespace(supports=lambda api_key: True, request=self._listed)

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *_: object) -> None: ...

    def nodes(self) -> list[Any]:
        return [self.bootstrap_broker]

    def topics(self, names: Any) -> dict[str, dict[int, int]]:
        return {"t": {0: 1, 1: 1}}

    def offsets(self, partitions: Any, timestamp_ms: int) -> dict[tuple[str, int], int]:
        return STARTS if timestamp_ms == EARLIEST else ENDS

    def _listed(self, api_key: int, request: Any) -> Any:
        if isinstance(request, m.ListGroupsRequest):
            group = m.ListGroupsResponse.Group(group_id="jobs", group_type="share", group_state="Stable")
            return m.ListGroupsResponse(groups=[group])
        return self._described()

    def _described(self) -> Any:
        response = m.ShareGroupDescribeResponse
        state = "Stable" if self.members else "Empty"
        return response(
            groups=[
                response.Group(
                    group_id="jobs", group_state=state, assignor_name="simple", group_epoch=3, members=self.members
                )
            ]
        )

    def request_coordinator(
        self, kind: int, name: str, api_key: int, request: Any, error_of: Callable[[Any], int], version_max: int = 99
    ) -> Any:
        assert name == "jobs"
        self.requests.append(request)
        response = self._answer(request)
        error_of(response)
        return response

    def _answer(self, request: Any) -> Any:
        match request:
            case m.ConsumerGroupDescribeRequest():
                group = m.ConsumerGroupDescribeResponse.Group(error_code=int(E.GROUP_ID_NOT_FOUND))
                return m.ConsumerGroupDescribeResponse(groups=[group])
            case m.ShareGroupDescribeRequest():
                return self._described()
            case m.DescribeShareGroupOffsetsRequest():
                response = m.DescribeShareGroupOffsetsResponse
                partitions = [
                    response.Partition(partition_index=0, start_offset=40, lag=55),
                    response.Partition(partition_index=1, start_offset=-1),
                ]
                topic = response.Topic(topic_name="t", partitions=partitions)
                return response(groups=[response.Group(group_id="jobs", topics=[topic])])
            case m.AlterShareGroupOffsetsRequest():
                altered = m.AlterShareGroupOffsetsResponse
                return altered(
                    error_code=self.error,
                    responses=[
                        altered.Topic(
                            topic_name=topic.topic_name,
                            partitions=[
                                altered.Partition(partition_index=one.partition_index) for one in topic.partitions
                            ],
                        )
                        for topic in request.topics
                    ],
                )
            case m.DeleteShareGroupOffsetsRequest():
                deleted = m.DeleteShareGroupOffsetsResponse
                return deleted(responses=[deleted.Topic(topic_name="t", error_code=self.error)])
        raise AssertionError(request)


@pytest.fixture
def mqd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    FakeCluster.members, FakeCluster.requests, FakeCluster.error = [], [], 0
    monkeypatch.setattr(broker_lookup, "Cluster", FakeCluster)

    def run(*words: str) -> Result:
        return CliRunner().invoke(command, list(words))

    return run


def member() -> Any:
    described = m.ShareGroupDescribeResponse
    assignment = described.Assignment(topic_partitions=[described.TopicPartitions(topic_name="t", partitions=[0, 1])])
    return described.Member(member_id="m-1", client_id="worker", client_host="/10.0.0.1", assignment=assignment)


def sent(kind: type) -> list[Any]:
    return [one for one in FakeCluster.requests if isinstance(one, kind)]


def test_list(mqd: Callable[..., Result]) -> None:
    assert json.loads(mqd("list", "--format", "json").stdout)[0] | {"members": 0} == {
        "group": "jobs",
        "type": "share",
        "protocol_type": "share",
        "protocol": "simple",
        "state": "Empty",
        "members": 0,
    }


def test_describe(mqd: Callable[..., Result]) -> None:
    FakeCluster.members = [member()]
    found = json.loads(mqd("describe", "jobs", "--format", "json").stdout)
    assert (found["type"], found["epoch"], found["lag"]) == ("share", 3, 55)
    assert found["members"][0]["assignment"] == {"t": [0, 1]}
    assert [
        (one["partition"], one["committed_offset"], one["lag"], one["member_id"]) for one in found["partitions"]
    ] == [(0, 40, 55, None), (1, None, None, None)]
    shown = mqd("describe", "jobs", "--format", "text").stdout
    assert "share protocol (simple)" in shown and "START" in shown and "COMMITTED" not in shown


def test_seek_is_a_dry_run_by_default(mqd: Callable[..., Result]) -> None:
    shown = mqd("seek", "jobs", "--to", "earliest")
    assert shown.exit_code == 0 and "nothing was changed" in shown.stdout, shown.output
    assert not sent(m.AlterShareGroupOffsetsRequest)
    mqd("seek", "jobs", "t", "--to", "20", "--execute")
    (request,) = sent(m.AlterShareGroupOffsetsRequest)
    (topic,) = request.topics
    assert [(one.partition_index, one.start_offset) for one in topic.partitions] == [(0, 20), (1, 20)]
    FakeCluster.error = int(E.NON_EMPTY_GROUP)
    refused = mqd("seek", "jobs", "--to", "latest", "--execute")
    assert refused.exit_code and "a member has joined in the meantime" in refused.output


def test_offsets_are_deleted(mqd: Callable[..., Result]) -> None:
    shown = mqd("delete-offsets", "jobs", "t")
    assert "would delete 1 offset" in shown.stdout and not sent(m.DeleteShareGroupOffsetsRequest)
    done = json.loads(mqd("delete-offsets", "jobs", "t", "--execute", "--format", "json").stdout)
    assert done["partitions"] == [{"topic": "t", "partition": 0, "start_offset": 40, "error": None}]
    assert [one.topic_name for one in sent(m.DeleteShareGroupOffsetsRequest)[0].topics] == ["t"]
    FakeCluster.error = int(E.UNKNOWN_TOPIC_OR_PARTITION)
    assert mqd("delete-offsets", "jobs", "t", "--execute").exit_code
    FakeCluster.members = [member()]
    refused = mqd("delete-offsets", "jobs", "t", "--execute")
    assert refused.exit_code and len(sent(m.DeleteShareGroupOffsetsRequest)) == 2
