"""min.insync.replicas: the value written with a new topic, and when it may change; acks.replicas, a minimum too."""

import pytest

from mqd.base.config import load_broker
from mqd.cluster.host import messages
from mqd.cluster.metadata.features import ACKS_REPLICAS_LEVEL
from mqd.cluster.metadata.records import TopicConfigured
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import topics as metadata_rules
from mqd.cluster.metadata.rules.configs import ConfigRules
from mqd.cluster.metadata.rules.placement import Directories
from mqd.cluster.metadata.view import View
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_feature_levels import raise_level, upgrade
from tests.unit.cluster.test_rules import cluster, topic
from tests.unit.controller.controller_world import World


def test_a_smaller_minimum_keeps_eligible_replicas() -> None:
    state = topic(cluster(), in_sync_replicas=(1,), eligible_leader_replicas=(2,))
    rules = ConfigRules(load_broker(None, {}, {"cluster.seeds": "127.0.0.1:9094"}))
    place = metadata_rules.PlacementContext(1, View(state), Directories(state, {}), 100)

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


@pytest.fixture(scope="module")
def spared() -> World:
    """A cluster with a topic that has acks.replicas."""
    world = World(3, 3)
    world.settle(20)
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world, ACKS_REPLICAS_LEVEL).error == 0
    assert world.send_request(messages.CreateTopic("t", -1, -1, {0: [2, 1, 3]}, {"acks.replicas": "2"})).error == 0
    return world


def alter(spared: World, name: str, value: str) -> messages.Response:
    operation = messages.ConfigOperation(name, "set", value)
    return spared.send_request(messages.AlterConfig(2, "t", [operation], False))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"acks.replicas": "1"}, "it must be at least 2"),
        ({"acks.replicas": "4"}, "more than the 3 replica(s)"),
        ({"acks.replicas": "2", "min.insync.replicas": "3"}, "less than min.insync.replicas=3"),
    ],
)
def test_what_is_refused(spared: World, config: dict[str, str], why: str) -> None:
    refused = spared.send_request(messages.CreateTopic("refused", 1, 3, {}, config))
    assert refused.error == E.INVALID_CONFIG and why in refused.message


def test_a_new_partition_begins_with_so_many_in_sync(spared: World) -> None:
    config = {"acks.replicas": "2"}
    assert spared.send_request(messages.CreateTopic("begun", -1, -1, {0: [2, 1, 3]}, config)).error == 0
    (partition,) = spared.unlogged.topics["begun"].partitions
    assert partition.in_sync_replicas == (2, 1) and partition.leader == 2


def test_it_is_the_minimum_too(spared: World) -> None:
    topic = spared.unlogged.topics["t"]
    assert spared.unlogged.min_in_sync(topic, topic.partitions[0]) == 2
    refused = alter(spared, "min.insync.replicas", "3")
    assert refused.error == E.INVALID_CONFIG and "acks=all would always be refused" in refused.message
    assert alter(spared, "min.insync.replicas", "1").error == 0
    topic = spared.unlogged.topics["t"]
    assert spared.unlogged.min_in_sync(topic, topic.partitions[0]) == 2
    assert alter(spared, "acks.replicas", "3").error == 0
    topic = spared.unlogged.topics["t"]
    assert spared.unlogged.min_in_sync(topic, topic.partitions[0]) == 3
    assert alter(spared, "acks.replicas", "2").error == 0


def test_a_reassignment_keeps_as_many_replicas(spared: World) -> None:
    response = spared.send_request(
        messages.AlterReassignments([messages.PartitionReassignment("t", 0, [2])], allow_replication_factor_change=True)
    )
    assert "acks.replicas=2, but would have only 1 replica(s)" in str(response)
