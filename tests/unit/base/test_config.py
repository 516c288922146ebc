"""Configuration: sources and their order, values and bounds, refusals and their messages."""

from pathlib import Path

import pytest

from mqd.base import config as c
from mqd.base import config_page, kafka_names
from mqd.base import listeners as of_clients
from mqd.base.config import BROKER, TOPIC
from mqd.base.properties_file import parse_properties
from mqd.base.property_values import ConfigError, canonical_text, parse_value


def refused(call, *parts: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return caught.value


def test_every_default_is_allowed_and_canonical():
    for table in (BROKER, TOPIC):
        for name, prop in table.items():
            assert name == prop.name and prop.doc
            if prop.default is not None:
                assert canonical_text(prop, prop.default) == prop.default, name


def test_every_topic_property_follows_an_existing_broker_property():
    for prop in TOPIC.values():
        assert prop.dynamic
        if prop.broker_name is not None:
            assert prop.broker_name in BROKER and prop.default is not None
            assert BROKER[prop.broker_name].kind == prop.kind


def test_defaults_are_kafkas():
    effective = c.topic_effective(c.load_broker(None, {}, {}), {})
    assert effective["retention.ms"] == "604800000"
    assert effective["segment.ms"] == "604800000"
    assert effective["segment.bytes"] == "1073741824"
    assert effective["max.message.bytes"] == "1048588"
    assert effective["message.timestamp.after.max.ms"] == "3600000"
    assert effective["flush.ms"] == effective["flush.messages"] == str(2**63 - 1)
    assert effective["flush.on.ack"] == "true"
    assert effective.keys() == TOPIC.keys()


# -- sources ---------------------------------------------------------------------------------------


def test_the_first_source_wins(tmp_path: Path):
    file = tmp_path / "server.properties"
    file.write_text("num.partitions=2\nlog.retention.hours=3\nnode.id=7\n")
    loaded = c.load_broker(
        file, {"MQD_NUM_PARTITIONS": "3", "MQD_LOG_RETENTION_HOURS": "4", "HOME": "/"}, {"num.partitions": "4"}
    )
    assert (loaded["num.partitions"], loaded["log.retention.hours"], loaded["node.id"]) == ("4", "4", "7")
    assert "log.dirs" not in loaded and "log.retention.ms" not in loaded


def test_variables_of_the_tools_are_not_properties():
    loaded = c.load_broker(
        None, {"MQD_BOOTSTRAP": "x", "MQD_DEBUG": "1", "MQD_TEST_SEED": "3", "MQD_CRASH_SEED": "7"}, {}
    )
    assert loaded == c.load_broker(None, {}, {})


def test_error_messages_name_the_source(tmp_path: Path):
    file = tmp_path / "server.properties"
    file.write_text("# a comment\n\nlog.retentoin.ms=5\n")
    refused(
        lambda: c.load_broker(file, {}, {}),
        f"{file} line 3",
        "log.retentoin.ms is not a known property",
        "did you mean log.retention.ms?",
    )
    refused(
        lambda: c.load_broker(None, {"MQD_LOGGING_LEVELS": "info"}, {}),
        "environment variable MQD_LOGGING_LEVELS",
        "did you mean logging.level?",
    )
    refused(lambda: c.load_broker(None, {}, {"node.id": "-1"}), "command line", "node.id cannot be '-1'", "at least 0")
    refused(lambda: c.load_broker(tmp_path / "absent", {}, {}), "cannot read the configuration file", "absent")
    (tmp_path / "binary").write_bytes(b"node.id=\xff\n")
    refused(lambda: c.load_broker(tmp_path / "binary", {}, {}), "cannot read the configuration file")


def test_names_in_the_wrong_place():
    refused(lambda: c.load_broker(None, {}, {"retention.ms": "1"}), "of topics, not of brokers", "log.retention.ms")
    assert str(refused(lambda: c.load_broker(None, {}, {"replica.lag.max.messages": "1"}), "of topics")).endswith(
        "not of brokers"
    )
    refused(lambda: c.validate_topic({"log.retention.bytes": "1"}), "of brokers, not of topics", "retention.bytes")
    refused(lambda: c.validate_topic({"node.id": "1"}), "of brokers, not of topics")
    refused(lambda: c.load_broker(None, {}, {"sasl.jaas.config": "x"}), "kept in the cluster's metadata")
    refused(lambda: c.validate_topic({"remote.storage.enable": "true"}), "tiered storage")
    refused(lambda: c.validate_topic({"zzzz": "true"}), "not a known property", "docs/configuration.md")


def test_kafkas_stock_file_starts(tmp_path: Path):
    file = tmp_path / "server.properties"
    file.write_text(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.bootstrap.servers=localhost:9093\n"
        "listeners=PLAINTEXT://:9092,CONTROLLER://:9093\ninter.broker.listener.name=PLAINTEXT\n"
        "advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093\ncontroller.listener.names=CONTROLLER\n"
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL\n"
        "num.network.threads=3\nnum.io.threads=8\nsocket.send.buffer.bytes=102400\nsocket.receive.buffer.bytes=102400\n"
        "socket.request.max.bytes=104857600\nlog.dirs=/tmp/kraft-combined-logs\nnum.partitions=1\nnum.recovery.threads.per.data.dir=1\n"
        "offsets.topic.replication.factor=1\nshare.coordinator.state.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "log.retention.hours=168\nlog.segment.bytes=1073741824\nlog.retention.check.interval.ms=300000\n"
    )
    loaded = c.load_broker(file, {}, {})
    assert of_clients.parse_listeners(loaded) == [of_clients.Listener("PLAINTEXT", "127.0.0.1", 9092)]
    assert of_clients.advertised_listeners(loaded) == {"PLAINTEXT": of_clients.Listener("PLAINTEXT", "localhost", 9092)}
    assert loaded["receive.arena.bytes"] == "16777216"
    assert (
        c.load_broker(None, {}, {"socket.request.max.bytes": "300000000"})["large.request.memory.bytes"] == "300000000"
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"share.session.timeout.ms": "44999"}, "must be from 45000 to 60000"),
        ({"share.heartbeat.interval.ms": "15001"}, "must be from 5000 to 15000"),
    ],
)
def test_a_share_groups_settings_are_bounded_by_the_brokers(given, why):
    broker = c.load_broker(None, {}, {})
    assert c.validate_group({"share.session.timeout.ms": "50000"}, broker) == {"share.session.timeout.ms": "50000"}
    with pytest.raises(c.ConfigError, match=why):
        c.validate_group(given, broker)


@pytest.mark.parametrize("kind", ["consumer", "share", "streams"])
def test_members_are_not_removed_between_two_heartbeats(kind):
    heartbeat, session = f"{kind}.heartbeat.interval.ms", f"{kind}.session.timeout.ms"
    limits = {f"group.{kind}.max.heartbeat.interval.ms": "60000"}
    broker = c.load_broker(None, {}, limits)
    assert c.validate_group({heartbeat: "44999", session: "45000"}, broker)
    with pytest.raises(c.ConfigError, match=f"{session}=45000 must be greater than {heartbeat}=45000"):
        c.validate_group({heartbeat: "45000", session: "45000"}, broker)
    with pytest.raises(c.ConfigError, match=f"group.{heartbeat}=45000 is too large for group.{session}=45000"):
        c.load_broker(None, {}, {**limits, f"group.{heartbeat}": "45000", f"group.{session}": "45000"})


def test_kafkas_properties_without_effect_are_accepted_and_listed():
    names = {"metric.reporters": "a.B", "group.share.enable": "true", "offsets.load.buffer.size": "5242880"}
    assert c.without_effect(c.load_broker(None, {}, names)) == sorted(names)
    documented = config_page.markdown()
    assert all(f"| `{name}` |" in documented for name in names)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("sasl.enabled.mechanisms", "GSSAPI", "Kerberos is not available"),
        ("listener.name.plaintext.log.retention.ms", "1000", "is the same for all listeners"),
        (
            "listener.name.external.ssl.engine.factory.class",
            "a.B",
            "listener.name.external.ssl.engine.factory.class cannot be set: the broker loads no Java classes",
        ),
        ("authorizer.class.name", "a.B", "it must be empty or one of"),
        ("super.users", "User:admin;ops", "a principal has a type and a name"),
        ("create.topic.policy.class.name", "a.B", "its restrictions would not be enforced"),
        ("log.local.retention.ms", "1000", "tiered storage"),
        ("inter.broker.protocol.version", "3.9", "delete the line"),
        ("log.message.format.version", "3.0", "delete the line"),
        ("security.inter.broker.protocol", "SSL", "cluster.tls=required encrypts"),
        ("client.quota.callback.class", "a.B", "kafka-configs"),
    ],
)
def test_kafkas_properties_that_cannot_be_honoured_stop_the_start(name, value, why):
    refused(lambda: c.load_broker(None, {}, {name: value}), name, why)


def test_kafkas_properties_with_neutral_values_are_accepted():
    given = {**kafka_names.HARMLESS, "security.inter.broker.protocol": "PLAINTEXT"}
    assert c.load_broker(None, {}, given) == c.load_broker(None, {}, {})
    topic = {"remote.storage.enable": "false", "local.retention.ms": "-2", "remote.log.copy.disable": "false"}
    assert c.validate_topic(topic) == topic


def test_flush_by_record_count_requires_flush_on_ack():
    way_out = ("records are not counted", "set log.flush.on.ack=true, or log.flush.interval.ms")
    given = {"log.flush.on.ack": "false", "log.flush.interval.messages": "1"}
    refused(lambda: c.load_broker(None, {}, given), *way_out)
    assert c.load_broker(None, {}, {"log.flush.interval.messages": "1"})
    refused(lambda: c.validate_topic({"flush.on.ack": "false", "flush.messages": "1"}), "or flush.ms instead")


def test_aliases():
    assert c.load_broker(None, {}, {"broker.id": "4"})["node.id"] == "4"
    assert c.load_broker(None, {}, {"log.dir": "/a , /b"})["log.dirs"] == "/a,/b"


def test_properties_syntax():
    text = "! comment\n  a = 1 \nb:2\nc 3\nd=one, \\\n   two\ne\\=f=g\nh=a\\tb\\u0041\\\\\ni=\nj\na=9\nk=last\\"
    found = {name: value for name, (value, _) in parse_properties(text).items()}
    assert found == {
        "a": "9",
        "b": "2",
        "c": "3",
        "d": "one, two",
        "e=f": "g",
        "h": "a\tbA\\",
        "i": "",
        "j": "",
        "k": "last",
    }
    assert parse_properties(text)["e=f"][1] == 7
    assert parse_properties("") == {} and c.parse_properties("\\") == {"": ("", 1)}


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("num.partitions", " 3 ", 3),
        ("log.retention.ms", "-1", -1),
        ("log.retention.ms", "+5", 5),
        ("log.preallocate", "TRUE", True),
        ("log.cleaner.min.cleanable.ratio", ".25", 0.25),
        ("log.cleanup.policy", " delete , ", ["delete"]),
        ("log.cleanup.policy", "", []),
        ("worker.cpus", "", []),
        ("io.backend", "epoll", "epoll"),
        ("log.flush.interval.messages", str(2**63 - 1), 2**63 - 1),
        ("broker.rack", "a b", "a b"),
    ],
)
def test_values(name, text, value):
    parsed = parse_value(BROKER[name], text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num.partitions", "0"),
        ("num.partitions", "1_0"),
        ("num.partitions", "1.0"),
        ("num.partitions", ""),
        ("num.partitions", "٣"),
        ("num.partitions", "16385"),
        ("message.max.bytes", str(2**31)),
        ("log.retention.ms", str(2**63)),
        ("log.retention.ms", "-2"),
        ("log.retention.ms", "9" * 5000),
        ("auto.create.topics.enable", "yes"),
        ("auto.create.topics.enable", ""),
        ("log.cleaner.min.cleanable.ratio", "nan"),
        ("log.cleaner.min.cleanable.ratio", "inf"),
        ("log.cleaner.min.cleanable.ratio", "1.5"),
        ("io.backend", "EPOLL"),
        ("log.cleanup.policy", ","),
        ("log.cleanup.policy", "delete,burn"),
        ("logging.level", "trace"),
        ("group.consumer.heartbeat.interval.quick.ms", "999"),
    ],
)
def test_invalid_values_are_refused(name, text):
    error = refused(lambda: c.load_broker(None, {}, {name: text}), name, "must be")
    assert error.name == name and error.value == text.strip()


def test_configs_of_kafka_that_mqd_lacks_are_reported_as_such():
    refused(lambda: c.validate_topic({"cleanup.policy": "compress"}), "any of delete, compact")
    refused(lambda: c.validate_topic({"compression.type": "brotli"}), "one of uncompressed")
    refused(lambda: c.validate_topic({"compression.gzip.level": "0"}), "level 0 does not compress")


def test_topic_values_are_made_canonical_and_null_means_the_brokers():
    assert c.validate_topic({"flush.on.ack": "False", "retention.ms": " 0060 ", "segment.ms": None}) == {
        "flush.on.ack": "false",
        "retention.ms": "60",
    }
    refused(lambda: c.validate_topic({"min.compaction.lag.ms": "5", "max.compaction.lag.ms": "4"}), "must not exceed")
    refused(
        lambda: c.validate_topic({"min.insync.replicas": "2"}), "a single host keeps only one replica", "set it to 1"
    )
    assert c.validate_topic({"replica.lag.max.messages": "-1"}) == {"replica.lag.max.messages": "-1"}
    refused(lambda: c.validate_topic({"replica.lag.max.messages": "0"}), "some records behind", "or to -1")


def test_unclean_elections_can_be_enabled():
    name = "unclean.leader.election.enable"
    for call in (c.validate_topic, c.validate_broker_dynamic, lambda chosen: c.load_broker(None, {}, chosen)):
        assert call({name: "True"})[name] == "true"
    assert c.load_broker(None, {}, {})[name] == "false"


def test_sensitive_values_are_not_shown():
    import msgspec

    secret = msgspec.structs.replace(BROKER["num.partitions"], sensitive=True)
    with pytest.raises(ConfigError) as caught:
        parse_value(secret, "hunter2")
    assert "hunter2" not in str(caught.value)


# -- properties together ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({"socket.request.max.bytes": "9000000", "large.request.memory.bytes": "8999999"}, "could never be received"),
        ({"message.max.bytes": "104857601"}, "could never arrive"),
        ({"log.preallocate.bytes.min": "1048576", "log.preallocate.bytes.max": "65536"}, "first step"),
        ({"log.scrub.interval.ms": "999"}, "at least 1000, or -1"),
        ({"receive.arena.bytes": "16777217"}, "multiple of 65536"),
        ({"retention.free.bytes": "1000"}, "must exceed log.dirs.free.bytes.min"),
        ({"min.insync.replicas": "2"}, "a single host keeps only one replica"),
        ({"worker.cpus": "0,a"}, "CPU numbers"),
        ({"worker.cpus": "3-1"}, "CPU numbers"),
        ({"worker.cpus": "0-2,1"}, "listed twice"),
        ({"listeners": ""}, "contains no listener for clients"),
        ({"listeners": "PLAINTEXT://0.0.0.0:9092"}, "listeners.insecure.allow=true"),
        ({"listeners": "PLAINTEXT://example.org:9092"}, "listeners.insecure.allow=true"),
        ({"listeners": "PLAINTEXT://127.0.0.1.example.org:9092"}, "listeners.insecure.allow=true"),
        ({"listeners": "PLAINTEXT://127.0.0.1:99999"}, "not NAME://HOST:PORT"),
        ({"listeners": "127.0.0.1:9092"}, "not NAME://HOST:PORT"),
        ({"listeners": "SSL://0.0.0.0:9092"}, "without authentication"),
        ({"listeners": "INSIDE://127.0.0.1:9092"}, "add INSIDE:PROTOCOL to listener.security.protocol.map"),
        ({"listeners": "PLAINTEXT://127.0.0.1:9092,PLAINTEXT://127.0.0.1:9093"}, "twice"),
        (
            {
                "listeners": "A://127.0.0.1:9092,B://127.0.0.1:9092",
                "listener.security.protocol.map": "A:PLAINTEXT,B:PLAINTEXT",
            },
            "twice",
        ),
        ({"advertised.listeners": "PLAINTEXT://0.0.0.0:9092"}, "no client can connect"),
        ({"advertised.listeners": "OTHER://localhost:9092"}, "which `listeners` does not"),
    ],
)
def test_contradictory_properties_are_refused(chosen, part):
    refused(lambda: c.load_broker(None, {}, chosen), part)


def test_listeners():
    def listeners(text: str, **more: str):
        return of_clients.parse_listeners(c.load_broker(None, {}, {"listeners": text, **more}))

    assert listeners("PLAINTEXT://[::1]:9092") == [of_clients.Listener("PLAINTEXT", "::1", 9092)]
    assert listeners("PLAINTEXT://localhost:0") == [of_clients.Listener("PLAINTEXT", "localhost", 0)]
    everywhere = {"listeners.insecure.allow": "true"}
    assert listeners("PLAINTEXT://:9092", **everywhere) == [of_clients.Listener("PLAINTEXT", "", 9092)]
    two = {"listener.security.protocol.map": "IN:PLAINTEXT,OUT:PLAINTEXT", **everywhere}
    assert [item.port for item in listeners("IN://127.0.0.1:9092,OUT://0.0.0.0:9094", **two)] == [9092, 9094]


def test_precedence_of_values():
    def retention(**broker: str) -> str:
        static = c.load_broker(None, {}, {name.replace("_", "."): value for name, value in broker.items()})
        return c.topic_effective(static, {})["retention.ms"]

    assert retention(log_retention_hours="2") == "7200000"
    assert retention(log_retention_hours="2", log_retention_minutes="3") == "180000"
    assert retention(log_retention_hours="2", log_retention_minutes="3", log_retention_ms="4") == "4"
    assert retention(log_retention_hours="-1") == "-1"
    static = c.load_broker(None, {}, {"log.roll.hours": "1", "log.flush.scheduler.interval.ms": "9"})
    assert c.topic_effective(static, {})["segment.ms"] == "3600000"
    assert c.topic_effective(static, {})["flush.ms"] == "9"
    assert c.topic_effective(c.broker_effective(static, {"log.roll.ms": "5"}), {})["segment.ms"] == "5"
    assert c.topic_effective(static, {"segment.ms": "6"})["segment.ms"] == "6"
    assert c.topic_value(c.topic_effective(static, {"cleanup.policy": "delete"}), "cleanup.policy") == ["delete"]
    assert c.broker_value(static, "log.roll.hours") == 1
    assert c.broker_value(static, "log.dirs") is None


def test_changes_at_run_time():
    static = c.load_broker(None, {}, {})
    assert c.validate_broker_dynamic({"log.retention.ms": "5", "log.roll.ms": None}, static) == {
        "log.retention.ms": "5"
    }
    refused(lambda: c.validate_broker_dynamic({"node.id": "2"}), "cannot be changed while the broker runs", "restart")
    refused(lambda: c.validate_broker_dynamic({"message.max.bytes": "104857601"}, static), "could never arrive")


def test_cpus(tmp_path: Path):
    assert c.parse_cpus("") == [] and c.parse_cpus("3, 0-1") == [3, 0, 1]
    cpus = c.usable_cpu_count(tmp_path)
    assert cpus >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert c.usable_cpu_count(tmp_path) == cpus
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert c.usable_cpu_count(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("100001 100000\n")
    assert c.usable_cpu_count(tmp_path) == min(cpus, 2)


def test_the_manual_page_is_current():
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == config_page.markdown(), (
        "run: python -m mqd.base.config_page > docs/configuration.md"
    )


def code_beside_the_tables() -> str:
    package = Path(c.__file__).parents[1]
    tables = (package / "base" / "properties.py", package / "base" / "kafka_names.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path not in tables)


def test_every_property_that_is_not_ignored_is_read_somewhere():
    code = code_beside_the_tables()
    followed = {prop.broker_name for prop in TOPIC.values()}
    unread = [
        name
        for table in (BROKER, TOPIC)
        for name, prop in table.items()
        if not prop.ignored and f'"{name}"' not in code and name not in followed
    ]
    levels = {"compression.gzip.level", "compression.lz4.level", "compression.zstd.level"}  # by the type's name
    assert [name for name in unread if name not in levels] == []


def test_every_property_that_is_ignored_is_read_nowhere():
    code = code_beside_the_tables()
    read = [name for table in (BROKER, TOPIC) for name, prop in table.items() if prop.ignored and f'"{name}"' in code]
    # checked beside flush.on.ack; properties of clients, too; passed to the core, which does not
    # count records
    assert read == [
        "log.flush.interval.messages",
        "request.timeout.ms",
        "ssl.endpoint.identification.algorithm",
        "flush.messages",
    ]


def test_settings_without_effect_are_named():
    loaded = c.load_broker(
        None, {}, {"num.io.threads": "8", "log.flush.interval.messages": "1", "log.retention.hours": "1"}
    )
    assert c.without_effect(loaded) == ["log.flush.interval.messages", "num.io.threads"]
    assert c.without_effect(c.load_broker(None, {}, {})) == []
    with_effect = c.load_broker(
        None, {}, {"replica.lag.time.max.ms": "30000", "controller.listener.names": "CONTROLLER"}
    )
    assert c.without_effect(with_effect) == [] and "| `replica.lag.time.max.ms` | `30000` |" in config_page.markdown()


def test_a_setting_of_one_listener():
    config = {"listener.name.inside.some.key": "2", "listener.name.other.some.key": "3", "some.key": "1"}
    assert of_clients.listener_settings(config, "INSIDE") == {"some.key": "2"}
    assert of_clients.listener_settings(config, "OUTSIDE") == {"some.key": "1"}
    inside = [of_clients.Listener("INSIDE", "127.0.0.1", 9092)]
    with pytest.raises(ConfigError, match="names listener OTHER, which is not in `listeners`"):
        of_clients.check_overrides({**config, "listeners": "INSIDE://127.0.0.1:9092"}, inside)
    assert of_clients.override_of("listener.name.INSIDE.some.key") == ("INSIDE", "some.key")
    assert of_clients.override_name("INSIDE", "some.key") == "listener.name.inside.some.key"
    assert of_clients.override_of("listener.name.inside") is None


OAUTH = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:9092",
    "sasl.enabled.mechanisms": "OAUTHBEARER",
    "sasl.oauthbearer.jwks.endpoint.url": "https://issuer.example/keys",
    "sasl.oauthbearer.expected.issuer": "https://issuer.example",
    "sasl.oauthbearer.expected.audience": "kafka",
}


def test_oauthbearer_requires_its_settings():
    assert c.load_broker(None, {}, OAUTH)["sasl.enabled.mechanisms"] == "OAUTHBEARER"
    for name in list(OAUTH)[2:]:
        given = {key: value for key, value in OAUTH.items() if key != name}
        refused(lambda given=given: c.load_broker(None, {}, given), name, "listener SASL_PLAINTEXT accepts OAUTHBEARER")
    refused(
        lambda: c.load_broker(None, {}, {**OAUTH, "sasl.oauthbearer.jwks.endpoint.url": "http://issuer.example/keys"}),
        "neither https:// nor file:///",
    )
    own = {name.replace("sasl.", "listener.name.sasl_plaintext.sasl."): value for name, value in OAUTH.items()}
    assert c.load_broker(None, {}, own)["listeners"] == OAUTH["listeners"]


def test_tls_listeners_off_loopback_require_certificates():
    def read(**more: str):
        own = {name.replace("_", "."): value for name, value in more.items()}
        return of_clients.parse_listeners({"listeners": "SSL://:9093", **own})

    assert read()[0].host == "127.0.0.1"
    assert read(ssl_client_auth="required")[0].host == ""
    refused(
        lambda: read(listeners="SSL://0.0.0.0:9093", ssl_client_auth="requested"),
        "without authentication",
        "ssl.client.auth=required, or listeners.insecure.allow=true",
    )
    own = {"listener.name.ssl.ssl.client.auth": "required"}
    assert read(listeners="SSL://0.0.0.0:9093", **own)[0].host == "0.0.0.0"
    many = ",".join(f"PLAINTEXT{number}://127.0.0.1:{number}" for number in range(1, 66))
    names = ",".join(f"PLAINTEXT{number}:PLAINTEXT" for number in range(1, 66))
    refused(lambda: read(listeners=many, listener_security_protocol_map=names), "at most 64")


def test_listeners_off_loopback_require_authentication():
    """Only the listener is set: no listeners.insecure.allow."""

    def host(text: str) -> str:
        return of_clients.parse_listeners({"listeners": text})[0].host

    for address in ("0.0.0.0", "[::]", "broker.example.org"):
        assert host(f"SASL_SSL://{address}:9092") == address.strip("[]")
        refused(lambda address=address: host(f"PLAINTEXT://{address}:9092"), "without authentication")
        refused(lambda address=address: host(f"SSL://{address}:9092"), "without authentication")
        refused(lambda address=address: host(f"SASL_PLAINTEXT://{address}:9092"), "are not encrypted")
    assert host("SASL_SSL://:9092") == "" and host("SASL_PLAINTEXT://:9092") == "127.0.0.1"


def test_hosts_authenticate_on_loopback_too_when_there_are_rights():
    cluster = {"cluster.seeds": "127.0.0.1:9094", "authorizer.class.name": "standard"}
    refused(lambda: c.load_broker(None, {}, cluster), "other users of this machine", "cluster.key.file")
    assert c.load_broker(None, {}, {**cluster, "authorizer.class.name": ""})
    assert c.load_broker(None, {}, {**cluster, "cluster.key.file": "/k"})["cluster.key.file"] == "/k"
