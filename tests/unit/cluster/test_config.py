"""Inter-broker listeners, seeds and the cluster's key."""

import itertools
import os

import pytest

from mqd.base import cluster_config, cluster_key
from mqd.base.config import load_broker
from mqd.base.property_values import ConfigError
from mqd.controller import options
from mqd.keeper import sockets


def config(**settings: str) -> dict[str, str]:
    return load_broker(None, {}, {name.replace("_", "."): value for name, value in settings.items()})


def test_a_single_host_has_no_inter_broker_listener():
    assert cluster_config.cluster_listeners(config()) is None and sockets.listen_cluster(config()) is None
    assert cluster_config.seeds(config()) == ()


def test_ports_follow_the_clients():
    places = cluster_config.cluster_listeners(
        config(cluster_seeds="127.0.0.2:9094, 127.0.0.1:9094", listeners="PLAINTEXT://127.0.0.2:9092")
    )
    assert (places.inter_broker.host, places.inter_broker.port) == ("127.0.0.2", 9093)
    assert (places.controller.host, places.controller.port) == ("127.0.0.2", 9094)
    places = cluster_config.cluster_listeners(
        config(controller_listener="127.0.0.1:7000", listeners="PLAINTEXT://127.0.0.1:0")
    )
    assert places.controller.port == 7000 and places.inter_broker.port == 0


def test_seeds_are_compared_in_one_form():
    assert cluster_config.seeds(config(cluster_seeds="LocalHost:9094,[::1]:07,localhost:9094")) == (
        "[::1]:7",
        "localhost:9094",
    )
    for bad in ("a", "a:0", ":9094", "a:99999", "http://a:1"):
        with pytest.raises(ConfigError, match=r"cluster\.seeds"):
            config(cluster_seeds=bad)


def test_without_a_key_only_loopback_is_allowed():
    open_to_all = {"listeners": "PLAINTEXT://127.0.0.1:9092", "controller_listener": "192.0.2.1:9094"}
    with pytest.raises(ConfigError, match="mqd cluster key"):
        config(**open_to_all)
    with pytest.raises(ConfigError, match="mqd cluster key"):
        config(inter_broker_listener="0.0.0.0:9093", advertised_inter_broker_listener="192.0.2.1:9093")
    assert config(**open_to_all, cluster_key_file="/etc/mqd.key")


def test_a_wildcard_needs_an_advertised_address():
    with pytest.raises(ConfigError, match=r"set advertised\.controller\.listener"):
        config(controller_listener="0.0.0.0:9094", cluster_key_file="/k")
    places = cluster_config.cluster_listeners(
        config(
            controller_listener="0.0.0.0:9094", cluster_key_file="/k", advertised_controller_listener="broker-1:19094"
        )
    )
    assert places.controller == ("0.0.0.0", 9094, "broker-1", 19094)


def test_heartbeats_fit_into_a_session():
    with pytest.raises(ConfigError, match="half"):
        config(broker_session_timeout_ms="1500", broker_heartbeat_interval_ms="1000")
    made = options.controller_options(
        config(
            broker_session_timeout_ms="2000", broker_heartbeat_interval_ms="300", auto_leader_rebalance_enable="false"
        )
    )
    assert (made.session_ms, made.heartbeat_ms, made.leader_imbalance_percent) == (2000, 300, 100)
    assert options.quorum_settings(config()).promise_ns == 2_000_000_000


def test_the_key_is_a_file_of_this_user(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef0123\n")
    os.chmod(path, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        cluster_config.load_key({"cluster.key.file": str(path)})
    os.chmod(path, 0o600)
    assert cluster_config.load_key({"cluster.key.file": str(path)}) == b"0123456789abcdef0123"
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        cluster_config.load_key({"cluster.key.file": str(path)})
    with pytest.raises(ConfigError, match="mqd cluster key"):
        cluster_config.load_key({"cluster.key.file": str(tmp_path / "none")})
    assert cluster_config.load_key({}) == cluster_config.LOOPBACK_KEY


def test_a_file_with_several_keys(tmp_path):
    path = tmp_path / "key"
    config = {"cluster.key.file": str(path)}

    def keys(content: bytes) -> tuple[bytes, ...]:
        path.write_bytes(content)
        path.chmod(0o600)
        return cluster_config.load_keys(config)

    one, two = b"o" * 43, b"t" * 43
    assert keys(one + b"\n" + two) == (one + b"\n" + two,), "one key of two lines, as releases before this read it"
    assert keys(b"# keys of an mqd cluster\n" + one + b"\n\n" + two + b"\n") == (one, two)
    assert cluster_config.load_key(config) == one
    for content, words in (
        (b"# keys of an mqd cluster\n", "holds 0 keys"),
        (b"# keys of an mqd cluster\n" + (one + b"\n") * 4, "holds 4 keys"),
        (b"# keys of an mqd cluster\n" + one + b"\nshort\n", "a key of 5 bytes"),
        (b"# keys of an mqd cluster\n" + one * 200, "bytes; a key has"),
    ):
        with pytest.raises(ConfigError, match=words):
            keys(content)


def test_a_key_is_changed_in_three_steps(tmp_path):
    path = tmp_path / "key"
    config = {"cluster.key.file": str(path)}
    cluster_key.make(path)
    with pytest.raises(FileExistsError):
        cluster_key.make(path)
    before = [cluster_config.load_keys(config)]
    for step in (1, 2, 3):
        assert cluster_key.rotate(path) == step
        before.append(cluster_config.load_keys(config))
    (old,), *_, (new,) = before
    assert old != new and before == [(old,), (old, new), (new, old), (new,)]
    for one, next_one in itertools.pairwise(before):
        assert one[0] in next_one and next_one[0] in one, "a host that is one step behind is let in, and lets in"
    assert cluster_key.rotate(path) == 1, "and again"
    for content in (
        b"",
        b"two\nlines",
        b"# keys of an mqd cluster\n" + new + b"\n",
        b"# keys of an mqd cluster, by hand\nab\ncd",
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError):
            cluster_key.rotate(path)
        assert path.read_bytes() == content


def test_sockets_between_hosts_are_bound_as_configured():
    made = sockets.listen_cluster(config(listeners="PLAINTEXT://127.0.0.1:0", controller_listener="127.0.0.1:0"))
    try:
        assert made.controller.getsockname() == made.gossip.getsockname() == made.controller_advertised
        assert (
            made.inter_broker.getsockname() == made.inter_broker_advertised
            and made.inter_broker_advertised != made.controller_advertised
        )
        taken = made.controller_advertised[1]
        with pytest.raises(sockets.ListenError, match=r"set controller\.listener"):
            sockets.listen_cluster(
                config(listeners="PLAINTEXT://127.0.0.1:0", controller_listener=f"127.0.0.1:{taken}")
            )
    finally:
        made.close()


def test_an_address_that_this_host_does_not_have_is_reported_with_its_setting():
    elsewhere = config(
        listeners="PLAINTEXT://127.0.0.1:0", controller_listener="192.0.2.1:9094", cluster_key_file="key"
    )
    with pytest.raises(sockets.ListenError, match=r"no such address; correct the setting controller\.listener"):
        sockets.listen_cluster(elsewhere)


def test_replication_factor_of_a_single_host():
    with pytest.raises(ConfigError, match="a single host keeps only one"):
        config(min_insync_replicas="2")
    assert config(min_insync_replicas="2", cluster_seeds="127.0.0.1:9094")["min.insync.replicas"] == "2"
    with pytest.raises(ConfigError, match="is not allowed"):
        config(min_insync_replicas="0")
