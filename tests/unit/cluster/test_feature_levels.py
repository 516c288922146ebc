"""Hosts of two versions in one cluster (mqd/cluster/metadata/features.py, V1-V5): the levels in
force while they coexist, which hosts are admitted, which records are written.
"""

import msgspec
import pytest

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.membership import peer_messages
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata import features
from mqd.cluster.metadata.features import FEATURES, MQD_VERSION
from mqd.cluster.metadata.records import FeatureLevelSet, GroupConfigured, decode_record, encode_record
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules import settings as settings_rules
from mqd.protocol.errors import ErrorCode as E
from tests.unit.cluster.test_brokers import run
from tests.unit.controller.controller_world import FEATURES as OLD
from tests.unit.controller.controller_world import World

NEW = features.supported()
UPGRADE = 1


def level(world: World, node: int) -> int:
    return features.in_force(world.hosts[node].core.committed.features)[MQD_VERSION]


def raise_level(world: World, to: int = 1, validate_only: bool = False) -> messages.Response:
    return world.send_request(
        messages.UpdateFeatures([messages.FeatureUpdate(MQD_VERSION, to, UPGRADE)]), validate_only=validate_only
    )


def upgrade(world: World, node: int) -> None:
    """Stops the host, installs the version, starts it."""
    if world.active == node:
        world.depose()
        world.elect(1 + node % len(world.hosts))
    world.crash(node, clean=True)
    world.hosts[node].features = NEW
    world.restart(node)
    run(world, 3_000)


@pytest.fixture
def world() -> World:
    """Three hosts of the old version, in service."""
    found = World(3, 3)
    found.settle(20)
    return found


def test_a_rolling_upgrade_changes_no_level_until_an_operator_raises_it(world: World) -> None:
    assert FEATURES[MQD_VERSION].unset_level == 0 and NEW[MQD_VERSION] == (0, 10)
    for node in (1, 2):
        upgrade(world, node)
        assert [level(world, host) for host in world.hosts] == [0, 0, 0]
        response = raise_level(world)
        waiting = [other for other in world.hosts if world.hosts[other].features == OLD]
        assert response.error == E.INVALID_UPDATE_VERSION
        assert all(
            (f"{other} at host{other} (0 to 0)" in response.message) == (other in waiting) for other in world.hosts
        ), response.message
    upgrade(world, 3)
    assert raise_level(world, validate_only=True).error == 0 and level(world, 1) == 0
    assert raise_level(world).error == 0
    run(world, 500)
    assert [level(world, host) for host in world.hosts] == [1, 1, 1]
    assert raise_level(world).error == 0, "repeated"


def test_a_host_that_is_down_is_counted(world: World) -> None:
    for node in (1, 2):
        upgrade(world, node)
    world.crash(3)
    if world.active < 0:
        world.elect(1)
    run(world, 10_000)
    state = world.hosts[1].core.committed
    assert state.brokers[3].fenced
    with pytest.raises(Refusal, match="broker 3 at host3"):
        settings_rules.update_features(
            state, messages.UpdateFeatures([messages.FeatureUpdate(MQD_VERSION, 1, UPGRADE)])
        )


def test_a_host_of_an_older_version_is_not_admitted(world: World) -> None:
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world).error == 0
    world.crash(3, clean=True)
    world.hosts[3].features = OLD
    world.restart(3)
    run(world, 3_000)
    assert (
        "the level of mqd.version is 1, and the host supports 0 to 0" in world.hosts[3].refused
        and "Install" in world.hosts[3].refused
    )
    assert world.hosts[1].core.committed.brokers[3].incarnation < world.hosts[3].incarnation
    upgrade(world, 3)
    assert world.hosts[1].core.committed.brokers[3].incarnation == world.hosts[3].incarnation


def test_new_records_are_not_written_until_all_hosts_are_upgraded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if GroupConfigured had been introduced with level 1."""
    monkeypatch.setitem(features.RECORD_LEVELS, GroupConfigured, 1)
    change = messages.AlterConfig(
        32, "g", [messages.ConfigOperation("consumer.session.timeout.ms", "set", "50000")], False
    )
    for node in (1, 2, 3):
        upgrade(world, node)
    count = len(world.log)
    refused = world.send_request(change)
    assert (
        refused.error == E.INVALID_UPDATE_VERSION
        and "mqd cluster upgrade" in refused.message
        and len(world.log) == count
    )
    assert raise_level(world).error == 0
    assert world.send_request(change).error == 0 and any(isinstance(record, GroupConfigured) for record in world.log)


def test_fifo_is_refused_until_all_hosts_keep_the_order(world: World) -> None:
    def change(name: str, value: str) -> messages.AlterConfig:
        return messages.AlterConfig(32, "g", [messages.ConfigOperation(name, "set", value)], False)

    refused = world.send_request(change("share.fifo", "key"))
    assert refused.error == E.INVALID_CONFIG
    assert "share.fifo needs mqd.version 7; the cluster is at 0." in refused.message
    assert world.send_request(change("share.isolation.level", "read_committed")).error == 0
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world, 7).error == 0
    assert world.send_request(change("share.fifo", "key")).error == 0


def test_a_level_of_mqd_never_falls(world: World) -> None:
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world).error == 0
    for how in (1, 2, 3):
        response = world.send_request(messages.UpdateFeatures([messages.FeatureUpdate(MQD_VERSION, 0, how)]))
        assert response.error == E.INVALID_UPDATE_VERSION and "already be stored" in response.message


def test_a_new_cluster_begins_with_its_founders_levels() -> None:
    world = World(5, 1)
    host = world.hosts[1]
    host.core.committed.cluster_id = host.core.proposed.cluster_id = ""
    world.proposed.clear()
    world.metadata(host, metadata_core.ClusterFounded("id", 1))
    assert FeatureLevelSet(MQD_VERSION, NEW[MQD_VERSION][1]) in world.proposed[0].records


# -- what a newer version says ---------------------------------------------------------------------


def test_messages_and_fields_of_a_newer_version_are_skipped() -> None:
    body = {
        "type": "Heartbeat",
        "node_id": 1,
        "broker_epoch": 2,
        "sent_ms": 3,
        "metadata_version": 4,
        "of_a_newer_version": [1, {"a": 2}],
    }
    assert peer_messages.decode(msgspec.msgpack.encode(body)) == broker_messages.Heartbeat(1, 2, 3, 4)
    assert peer_messages.decode(msgspec.msgpack.encode({"type": "OfANewerVersion", "node_id": 1})) is None
    inside = {
        "type": "ChangeForwarded",
        "node_id": 1,
        "broker_epoch": 1,
        "request_id": 1,
        "incarnation": 1,
        "request": {"type": "OfANewerVersion"},
    }
    assert peer_messages.decode(msgspec.msgpack.encode(inside)) is None, (
        "its sender gets REQUEST_TIMED_OUT from its own host"
    )
    with pytest.raises(peer_messages.PeerProtocolError):
        peer_messages.decode(msgspec.msgpack.encode({**body, "node_id": "one"}))


def test_unknown_fields_of_records_are_skipped_and_unknown_records_refused() -> None:
    value = msgspec.msgpack.decode(encode_record(FeatureLevelSet("a", 1)))
    assert decode_record(msgspec.msgpack.encode({**value, "of_a_newer_version": 7})) == FeatureLevelSet("a", 1)
    with pytest.raises(ValueError, match="this version of mqd knows"):
        decode_record(msgspec.msgpack.encode({**value, "type": "feature_level_set/2"}))


def test_unsupported_feature_levels_are_named() -> None:
    assert features.describe_unsupported({}, {}) == "; ".join(
        f"the level of {one.name} is {one.unset_level}, and the host supports 0 to 0"
        for one in sorted(FEATURES.values())
        if one.unset_level
    )
    assert features.describe_unsupported({MQD_VERSION: 1}, NEW) == "" and features.describe_unsupported({}, OLD) == ""
    assert features.describe_unsupported({}, features.supported_levels({})) == "", (
        "a peer of the first version says nothing of levels"
    )
    assert (
        features.describe_unsupported({MQD_VERSION: 1}, features.supported_levels({}))
        == "the level of mqd.version is 1, and the host supports 0 to 0"
        and features.supported_levels(OLD) == OLD
    )
    assert (
        features.describe_unsupported({MQD_VERSION: 11}, NEW)
        == "the level of mqd.version is 11, and the host supports 0 to 10"
    )
    assert (
        features.describe_unsupported({"of.a.newer.version": 1}, NEW)
        == "the level of of.a.newer.version is 1, and the host supports 0 to 0"
    )
    assert features.describe_unsupported({"of.a.newer.version": 0}, NEW) == ""


def test_the_cap_for_tests() -> None:
    capped = features._capped(FEATURES, "mqd.version=0,metadata.version=3")
    assert (
        capped[MQD_VERSION].last == 0
        and capped["metadata.version"].last == 25
        and capped["group.version"] == FEATURES["group.version"]
    )


def test_spares_are_refused_until_all_hosts_know_them(world: World) -> None:
    change = messages.CreateTopic("orders", 1, 3, {}, {"acks.replicas": "2"})
    refused = world.send_request(change)
    assert refused.error == E.INVALID_CONFIG and "it needs level 10 of mqd.version" in refused.message
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world, 10).error == 0
    assert world.send_request(change).error == 0


def test_views_are_refused_until_all_hosts_know_them(world: World) -> None:
    base = messages.CreateTopic("orders", 1, 1, {}, {})
    view = messages.CreateTopic("orders-eu", -1, -1, {}, {"view.of": "orders", "view.filter": "region = 'eu'"})
    assert world.send_request(base).error == 0
    refused = world.send_request(view)
    assert refused.error == E.INVALID_CONFIG and "it needs level 9 of mqd.version" in refused.message
    for node in (1, 2, 3):
        upgrade(world, node)
    assert raise_level(world, 9).error == 0
    assert world.send_request(view).error == 0
    assert world.send_request(messages.DeleteTopic("orders", None)).error == E.POLICY_VIOLATION
    assert world.send_request(messages.DeleteTopic("orders-eu", None)).error == 0
    assert world.send_request(messages.DeleteTopic("orders", None)).error == 0
