"""min.insync.replicas: the value written with a new topic, and when it may change."""

import pytest

from mqd.base.config import load_broker
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import TopicConfigured
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import topics as metadata_rules
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import Directories
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_rules import cluster, topic
from tests.unit.controller.controller_world import World


def test_a_smaller_minimum_keeps_eligible_replicas() -> None:
    state = topic(cluster(), in_sync_replicas=(1,), eligible_leader_replicas=(2,))
    rules = ConfigRules(load_broker(None, {}, {"cluster.seeds": "127.0.0.1:9094"}))
    place = metadata_rules.Placement(1, View(state), Directories(state, {}), 100)

    def alter(resource: int, name: str, value: str):
        return metadata_rules.alter_config(
            state,
            messages.AlterConfig(
                resource, name, [messages.ConfigOperation("min.insync.replicas", "set", value)], False
            ),
            place,
            rules,
        )

    for resource, name in ((2, "t"), (4, "")):
        with pytest.raises(Refusal) as refused:
            alter(resource, name, "1")
        assert refused.value.error == E.POLICY_VIOLATION and "eligible" in refused.value.message
    with pytest.raises(Refusal) as refused:
        alter(4, "1", "1")
    assert refused.value.error == E.INVALID_CONFIG
    assert isinstance(alter(2, "t", "3")[0], TopicConfigured)


def test_defaults_of_the_controllers_file_go_into_the_log() -> None:
    world = World(5, 3, static={"cluster.seeds": "127.0.0.1:9094", "min.insync.replicas": "1"})
    world.settle(20)
    assert world.send_request(messages.CreateTopic("t", 1, 3, {}, {})).error == 0
    assert world.unlogged.topics["t"].config == {"min.insync.replicas": "1"}
    plain = World(5, 3)
    plain.settle(20)
    assert (
        plain.send_request(messages.CreateTopic("t", 1, 3, {}, {})).error == 0
        and plain.unlogged.topics["t"].config == {}
    )


def test_a_new_topic_of_two_replicas_continues_with_one() -> None:
    """Written explicitly: an existing topic has no such entry and keeps 2. Internal topics grow
    with the cluster.
    """
    world = World(5, 2)
    world.settle(20)
    for change in (
        messages.CreateTopic("t", 1, 2, {}, {}),
        messages.CreateTopic("by-hand", -1, -1, {0: [2, 1]}, {}),
        messages.CreateTopic("set", 1, 2, {}, {"min.insync.replicas": "2"}),
    ):
        assert world.send_request(change).error == 0
    assert world.send_request(messages.CreateTopic("__consumer_offsets", 1, 2, {}, {})).error == 0
    topics = world.unlogged.topics
    assert {name: topics[name].config.get("min.insync.replicas") for name in topics} == {
        "t": "1",
        "by-hand": "1",
        "set": "2",
        "__consumer_offsets": None,
    }
    assert [
        world.unlogged.min_in_sync(topics[name], topics[name].partitions[0])
        for name in ("t", "set", "__consumer_offsets")
    ] == [1, 2, 2]
    assert world.unlogged.min_in_sync(topic(cluster(3), (1, 2)).topics["t"], topics["t"].partitions[0]) == 2
