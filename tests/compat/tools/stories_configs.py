"""Stories of settings and features: kafka-configs, kafka-features, kafka-client-metrics, kafka-acls,
kafka-delegation-tokens.
"""

from __future__ import annotations

from tests.compat.tools.sides import Side
from tests.compat.tools.story import story


@story("configs", "a topic: set, change, append, delete")
def configs_topic(side: Side) -> None:
    side.topic("set")
    of = ("--entity-type", "topics", "--entity-name", "set")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config", "retention.ms=1000,segment.bytes=1048576")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config", "cleanup.policy=[compact,delete]")
    side.run("configs", *of, "--alter", "--delete-config", "retention.ms")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--delete-config", "retention.ms")
    side.run("configs", *of, "--alter", "--delete-config", "no.such.config")
    side.run("configs", *of, "--alter", "--add-config", "no.such.config=1")
    side.run("configs", *of, "--alter", "--add-config", "retention.ms=soon")
    side.run("configs", *of, "--alter", "--add-config", "retention.ms=-7")
    side.run("configs", *of, "--alter", "--add-config", "min.insync.replicas=0")
    side.run("configs", *of, "--alter", "--add-config", "compression.type=rar")
    side.run("configs", *of, "--alter", "--add-config", "cleanup.policy=")
    side.run("configs", *of, "--alter", "--add-config", "retention.ms=1,segment.bytes=x")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config-file", side.file("set.properties", "retention.ms=7000\n"))
    side.run("configs", "--topic", "set", "--describe")
    side.run("configs", "--topic", "set", "--alter", "--delete-config", "retention.ms,segment.bytes,cleanup.policy")
    side.run("configs", "--topic", "set", "--describe")


@story("configs", "a topic: all settings, with their sources")
def configs_topic_all(side: Side) -> None:
    side.topic("everything", "--config", "retention.ms=5")
    side.run("configs", "--topic", "everything", "--describe", "--all", unordered=True)


@story("configs", "a topic that does not exist")
def configs_missing(side: Side) -> None:
    of = ("--entity-type", "topics", "--entity-name", "nowhere")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config", "retention.ms=1")
    side.run("configs", "--entity-type", "topics", "--entity-name", "bad name", "--describe")


@story("configs", "a broker: set, default, delete")
def configs_broker(side: Side) -> None:
    one, default = ("--entity-type", "brokers", "--entity-name", "1"), ("--entity-type", "brokers", "--entity-default")
    side.run("configs", *one, "--describe")
    side.run("configs", *one, "--alter", "--add-config", "log.retention.ms=1000000")
    side.run("configs", *one, "--describe", until=lambda ran: "log.retention.ms=1000000 " in ran.out)
    side.run("configs", *default, "--describe")
    side.run("configs", *default, "--alter", "--add-config", "log.retention.ms=2000000,message.max.bytes=2000000")
    side.run("configs", *default, "--describe")
    side.run("configs", *one, "--describe")
    side.run("configs", *one, "--alter", "--delete-config", "log.retention.ms")
    side.run("configs", *one, "--describe")
    side.topic("from-broker")
    side.run("configs", "--topic", "from-broker", "--describe")
    side.run("configs", *default, "--alter", "--delete-config", "log.retention.ms,message.max.bytes")
    side.run("configs", *default, "--describe")
    side.run("configs", *one, "--alter", "--add-config", "node.id=4")
    side.run("configs", *one, "--alter", "--add-config", "broker.id=4")
    side.run("configs", *one, "--alter", "--add-config", "log.dirs=/tmp")
    side.run("configs", *one, "--alter", "--add-config", "no.such.config=1")
    side.run("configs", *one, "--alter", "--delete-config", "no.such.config")
    side.run("configs", *one, "--alter", "--add-config", "log.retention.ms=soon")
    side.run("configs", "--entity-type", "brokers", "--entity-name", "9", "--describe", *side.impatient())
    side.run("configs", "--entity-type", "brokers", "--entity-name", "x", "--describe")
    # Kafka deletes a property asynchronously, and shows it as null for a moment
    side.run("configs", "--entity-type", "brokers", "--describe", until=lambda ran: "no.such.config" not in ran.out)


@story("configs", "quotas of users, clients and addresses")
def configs_quotas(side: Side) -> None:
    rate = "producer_byte_rate=1024,consumer_byte_rate=2048"
    for of in (
        ("--entity-type", "clients", "--entity-name", "loader"),
        ("--entity-type", "clients", "--entity-default"),
        ("--entity-type", "users", "--entity-name", "alice"),
        ("--entity-type", "users", "--entity-default"),
        ("--entity-type", "users", "--entity-name", "alice", "--entity-type", "clients", "--entity-name", "loader"),
    ):
        side.run("configs", *of, "--alter", "--add-config", rate)
        side.run("configs", *of, "--describe")
        side.run("configs", *of, "--alter", "--delete-config", "producer_byte_rate")
        side.run("configs", *of, "--describe")
        side.run("configs", *of, "--alter", "--delete-config", "consumer_byte_rate")
        side.run("configs", *of, "--describe")
    clients = ("--entity-type", "clients", "--entity-name", "loader")
    side.run("configs", *clients, "--alter", "--add-config", "request_percentage=50,controller_mutation_rate=3")
    side.run("configs", "--entity-type", "clients", "--describe")
    side.run("configs", *clients, "--alter", "--add-config", "producer_byte_rate=-5")
    side.run("configs", *clients, "--alter", "--add-config", "producer_byte_rate=fast")
    side.run("configs", *clients, "--alter", "--add-config", "no_such_quota=1")
    side.run("configs", *clients, "--alter", "--delete-config", "no_such_quota")
    side.run("configs", *clients, "--alter", "--delete-config", "request_percentage,controller_mutation_rate")
    ips = ("--entity-type", "ips", "--entity-name", "10.0.0.1")
    for of in (ips, ("--entity-type", "ips", "--entity-default")):
        side.run("configs", *of, "--alter", "--add-config", "connection_creation_rate=10")
        side.run("configs", "--entity-type", "ips", "--describe")
    side.run("configs", *ips, "--alter", "--add-config", "connection_creation_rate=0")
    side.run("configs", *ips, "--alter", "--add-config", "producer_byte_rate=1")
    side.run("configs", *ips, "--entity-type", "users", "--entity-name", "alice", "--describe")
    for of in (ips, ("--entity-type", "ips", "--entity-default")):
        side.run("configs", *of, "--alter", "--delete-config", "connection_creation_rate")
    everyone = ("--entity-type", "users", "--entity-default", "--entity-type", "clients", "--entity-default")
    side.run("configs", *everyone, "--alter", "--add-config", "producer_byte_rate=100000000")
    side.run("configs", "--entity-type", "users", "--entity-type", "clients", "--describe")
    side.run("configs", "--entity-type", "users", "--describe")
    side.run("configs", *everyone, "--alter", "--delete-config", "producer_byte_rate")


@story("configs", "groups")
def configs_groups(side: Side) -> None:
    of = ("--entity-type", "groups", "--entity-name", "tuned")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config", "consumer.session.timeout.ms=50000")
    side.run("configs", *of, "--describe")
    side.run("configs", *of, "--alter", "--add-config", "consumer.session.timeout.ms=1")
    side.run("configs", *of, "--alter", "--add-config", "consumer.session.timeout.ms=soon")
    side.run("configs", *of, "--alter", "--add-config", "no.such.config=1")
    side.run("configs", "--group", "tuned", "--describe")
    side.run("configs", *of, "--alter", "--delete-config", "consumer.session.timeout.ms")
    side.run("configs", *of, "--describe")


@story("configs", "SCRAM credentials, loggers")
def configs_not_there(side: Side) -> None:
    alice = ("--entity-type", "users", "--entity-name", "alice")
    side.run("configs", *alice, "--alter", "--add-config", "SCRAM-SHA-256=[iterations=8192,password=secret]")
    side.run("configs", *alice, "--describe")
    side.run("configs", *alice, "--alter", "--delete-config", "SCRAM-SHA-256")
    loggers = ("--entity-type", "broker-loggers", "--entity-name", "1")
    side.run("configs", *loggers, "--alter", "--add-config", "kafka.server=DEBUG")
    side.run("configs", *loggers, "--alter", "--add-config", "kafka.server=LOUD")


@story("configs", "invalid arguments")
def configs_usage(side: Side) -> None:
    side.run("configs")
    side.run("configs", "--describe", "--entity-type", "spoons", "--entity-name", "x")
    side.run("configs", "--alter", "--entity-type", "topics", "--entity-name", "x")
    side.run("configs", "--alter", "--add-config", "a=b", "--entity-type", "topics")
    side.run("configs", "--alter", "--entity-type", "topics", "--entity-name", "x", "--add-config", "a")
    side.run("configs", "--describe", "--add-config", "a=b", "--topic", "x")


@story("configs", "three brokers: the cluster-wide default, one broker's setting", brokers=3)
def configs_three(side: Side) -> None:
    side.run(
        "configs", "--entity-type", "brokers", "--entity-default", "--alter", "--add-config", "log.retention.ms=3000000"
    )
    side.run("configs", "--broker", "2", "--alter", "--add-config", "log.retention.ms=2000000")
    for node in ("1", "2"):
        side.run("configs", "--broker", node, "--describe", until=lambda ran: "log.retention.ms" in ran.out)
    side.run("configs", "--entity-type", "brokers", "--describe", unordered=True)
    side.run("configs", "--broker", "2", "--alter", "--delete-config", "log.retention.ms")
    side.run("configs", "--broker-defaults", "--alter", "--delete-config", "log.retention.ms")
    side.run("configs", "--entity-type", "brokers", "--describe", unordered=True)


@story("features", "describe, upgrade, downgrade, dry run")
def features(side: Side) -> None:
    side.run("features", "describe", unordered=True, shape=True)
    side.run("features", "version-mapping", "--release-version", "4.1", unordered=True)
    side.run("features", "feature-dependencies", "--feature", "group.version=1", unordered=True)
    side.run("features", "upgrade", "--feature", "group.version=1")
    side.run("features", "upgrade", "--feature", "group.version=9", "--dry-run")
    side.run("features", "upgrade", "--feature", "no.such.feature=1")
    side.run("features", "upgrade", "--feature", "group.version=x")
    side.run("features", "downgrade", "--feature", "transaction.version=0", "--dry-run")
    side.run("features", "downgrade", "--feature", "transaction.version=1", "--dry-run")
    side.run("features", "disable", "--feature", "group.version", "--dry-run")
    side.run("features", "disable", "--feature", "no.such.feature", "--dry-run")
    side.run("features", "upgrade", "--release-version", "4.2", "--dry-run", unordered=True)
    side.run("features", "upgrade", "--release-version", "9.9", "--dry-run")
    side.run("features", "downgrade", "--release-version", "4.0", "--dry-run", unordered=True)
    side.run("features")


@story("client-metrics", "list, alter, describe, delete")
def client_metrics(side: Side) -> None:
    side.run("client-metrics", "--list")
    side.run(
        "client-metrics", "--alter", "--name", "m1", "--metrics", "org.apache.kafka.producer.", "--interval", "1000"
    )
    side.run("client-metrics", "--describe", "--name", "m1")
    side.run("client-metrics", "--describe")
    side.run("client-metrics", "--delete", "--name", "m1")
    side.run("client-metrics", "--alter", "--name", "m1", "--interval", "1")
    side.run("client-metrics")


@story("acls", "ACLs on topics, groups, the cluster")
def acls(side: Side) -> None:
    alice = ("--allow-principal", "User:alice")
    side.run("acls", "--list")
    side.run("acls", "--add", *alice, "--operation", "Read", "--topic", "x")
    side.run("acls", "--add", *alice, "--operation", "Read", "--topic", "x")
    side.run("acls", "--list", "--topic", "x", unordered=True)
    side.run(
        "acls", "--add", "--deny-principal", "User:*", "--deny-host", "10.0.0.7", "--operation", "All", "--group", "g"
    )
    side.run(
        "acls", "--add", *alice, "--producer", "--topic", "pre", "--resource-pattern-type", "prefixed", unordered=True
    )
    side.run("acls", "--add", *alice, "--operation", "Alter", "--cluster")
    side.run("acls", "--list", unordered=True)
    side.run("acls", "--list", "--topic", "prefix", "--resource-pattern-type", "match", unordered=True)
    side.run("acls", "--list", "--principal", "User:nobody")
    side.run("acls", "--add", "--allow-principal", "alice", "--operation", "Read", "--topic", "x")
    side.run("acls", "--remove", *alice, "--operation", "Read", "--topic", "x", "--force")
    side.run("acls", "--remove", "--topic", "pre", "--resource-pattern-type", "prefixed", "--force")
    side.run("acls", "--list", unordered=True)
    side.run("acls", unordered="words")
    side.run(
        "acls", "--add", "--topic", "x", "--operation", "Dance", "--allow-principal", "User:alice", unordered="words"
    )


@story("delegation-tokens", "without authentication")
def delegation_tokens(side: Side) -> None:
    config = ("--command-config", side.file("token.properties", ""))
    side.run("delegation-tokens", "--create", "--max-life-time-period", "-1", *config)
    side.run("delegation-tokens", "--describe", *config)
    side.run("delegation-tokens", "--renew", "--renew-time-period", "-1", "--hmac", "YQ==", *config)
    side.run("delegation-tokens", "--expire", "--expiry-time-period", "-1", "--hmac", "YQ==", *config)
    side.run("delegation-tokens")
