"""Stories of topics: kafka-topics, kafka-delete-records, kafka-get-offsets, kafka-log-dirs."""

from __future__ import annotations

import json

from tests.compat.tools.sides import Side
from tests.compat.tools.story import story


@story("topics", "create, describe, alter, delete")
def topics_life(side: Side) -> None:
    side.run("topics", "--create", "--topic", "life", "--partitions", "3", "--replication-factor", "1")
    side.run("topics", "--describe", "--topic", "life")
    side.run("topics", "--list", "--topic", "life.*")
    side.run("topics", "--create", "--topic", "life", "--partitions", "3")
    side.run("topics", "--create", "--topic", "life", "--if-not-exists")
    side.run("topics", "--alter", "--topic", "life", "--partitions", "5")
    side.run("topics", "--describe", "--topic", "life", until=lambda ran: "Partition: 4" in ran.out)
    side.run("topics", "--alter", "--topic", "life", "--partitions", "2")
    side.run("topics", "--alter", "--topic", "life", "--partitions", "5")
    side.run("topics", "--delete", "--topic", "life")
    side.run("topics", "--describe", "--topic", "life", until=lambda ran: ran.code != 0)
    side.run("topics", "--list", "--topic", "life.*")


@story("topics", "a topic that does not exist")
def topics_missing(side: Side) -> None:
    side.run("topics", "--describe", "--topic", "nowhere")
    side.run("topics", "--describe", "--topic", "nowhere", "--if-exists")
    side.run("topics", "--delete", "--topic", "nowhere")
    side.run("topics", "--delete", "--topic", "nowhere", "--if-exists")
    side.run("topics", "--alter", "--topic", "nowhere", "--partitions", "4")
    side.run("topics", "--alter", "--topic", "nowhere", "--partitions", "4", "--if-exists")
    side.run("topics", "--describe", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ")
    side.run("topics", "--describe", "--topic-id", "not-an-id")


@story("topics", "names and numbers that are refused")
def topics_refused(side: Side) -> None:
    for words in (
        ("--topic", "with space"),
        ("--topic", ""),
        ("--topic", "."),
        ("--topic", "x" * 250),
        ("--topic", "refused", "--partitions", "0"),
        ("--topic", "refused", "--partitions", "-1"),
        ("--topic", "refused", "--replication-factor", "3"),
        ("--topic", "refused", "--replication-factor", "0"),
        ("--topic", "refused", "--replica-assignment", "1,9"),
        ("--topic", "refused", "--replica-assignment", "1:1"),
        ("--topic", "refused", "--replica-assignment", "1", "--partitions", "2"),
        ("--topic", "refused", "--config", "retention.ms=soon"),
        ("--topic", "refused", "--config", "no.such.config=1"),
        ("--topic", "refused", "--config", "cleanup.policy=shred"),
        ("--topic", "refused", "--config", "retention.ms"),
    ):
        side.run("topics", "--create", *words)
    side.run("topics", "--list", "--topic", "refused")


@story("topics", "names that collide in metrics")
def topics_collide(side: Side) -> None:
    side.run("topics", "--create", "--topic", "col.lide")
    side.run("topics", "--create", "--topic", "col_lide")
    side.run("topics", "--list", "--topic", "col.lide")


@story("topics", "with configs of its own")
def topics_configs(side: Side) -> None:
    words = (
        "--config",
        "retention.ms=3600000",
        "--config",
        "cleanup.policy=compact",
        "--config",
        "max.message.bytes=5000",
    )
    side.run("topics", "--create", "--topic", "configured", *words)
    side.run("topics", "--describe", "--topic", "configured")
    side.run("topics", "--create", "--topic", "plain", "--partitions", "2")
    side.run("topics", "--describe", "--topics-with-overrides", "--topic", "configured|plain")
    side.run("topics", "--describe", "--topic", "configured|plain")
    side.run("topics", "--describe", "--exclude-internal", "--topic", "configured|plain")


@story("topics", "invalid arguments")
def topics_usage(side: Side) -> None:
    side.run("topics")
    side.run("topics", "--create")
    side.run("topics", "--create", "--delete", "--topic", "x")
    side.run("topics", "--alter", "--topic", "x")
    side.run("topics", "--no-such-option")
    side.run("topics", "--describe", "--topic", "x", "--partitions", "3")
    side.run("topics", "--list", bootstrap=False)


@story("topics", "internal topics")
def topics_internal(side: Side) -> None:
    side.run("topics", "--create", "--topic", "internal-source", quiet=True)
    side.produce("internal-source", ["a"])
    side.run(
        "console-consumer",
        "--topic",
        "internal-source",
        "--group",
        "internal-group",
        "--from-beginning",
        "--max-messages",
        "1",
        "--timeout-ms",
        "20000",
    )
    side.run("topics", "--describe", "--topic", "__consumer_offsets")
    side.run("topics", "--list", "--exclude-internal", "--topic", "__.*")
    side.run("topics", "--list", "--topic", "__consumer.*")


@story("topics", "three brokers: replicas, filters for what is under-replicated", brokers=3)
def topics_three(side: Side) -> None:
    assignment = ("--replica-assignment", "1:2:3,2:3:1,3:1:2")
    side.run("topics", "--create", "--topic", "three", *assignment, "--config", "min.insync.replicas=3")
    side.run(
        "topics", "--create", "--topic", "two", "--replica-assignment", "1:2,2:1", "--config", "min.insync.replicas=1"
    )
    side.run(
        "topics", "--create", "--topic", "lonely", "--replica-assignment", "3", "--config", "min.insync.replicas=1"
    )
    side.run("topics", "--create", "--topic", "defaults", "--partitions", "6")
    filters = (
        "--under-replicated-partitions",
        "--under-min-isr-partitions",
        "--at-min-isr-partitions",
        "--unavailable-partitions",
    )
    topics = ("--topic", "three|two|lonely")
    side.run("topics", "--describe", *topics)
    for name in filters:
        side.run("topics", "--describe", *topics, name)
    side.stop(3)
    side.run(
        "topics", "--describe", *topics, until=lambda ran: "Leader: 3" not in ran.out and "Isr: 1,2,3" not in ran.out
    )
    for name in filters:
        side.run("topics", "--describe", *topics, name)
    side.run("topics", "--create", "--topic", "while-down", "--replication-factor", "3", "--partitions", "2")
    side.run("topics", "--create", "--topic", "named-down", "--replica-assignment", "1:2:3")
    side.run("topics", "--describe", "--topic", "named-down")
    side.run("topics", "--create", "--topic", "too-many", "--replication-factor", "4")
    side.start(3)
    back = "Isr: 1,2,3"
    side.run(
        "topics", "--describe", "--topic", "named-down", until=lambda ran: back in ran.out or "Isr: 1,2,3" in ran.out
    )
    side.run("topics", "--describe", *topics, *filters[:1], until=lambda ran: not ran.out.strip())
    side.run("topics", "--describe", "--under-min-isr-partitions", "--topic", "three|two|lonely|while-down")
    for name in ("three", "two", "lonely", "defaults", "while-down", "named-down"):
        side.run("topics", "--delete", "--topic", name)


@story("delete-records", "the offsets in a file")
def delete_records(side: Side) -> None:
    side.run("topics", "--create", "--topic", "deleted", "--partitions", "2", quiet=True)
    side.produce("deleted", [f"v{n}" for n in range(10)])

    def plan(*rows: tuple[str, int, int]) -> str:
        entries = [{"topic": topic, "partition": partition, "offset": offset} for topic, partition, offset in rows]
        return side.file("delete.json", json.dumps({"partitions": entries, "version": 1}))

    for rows in (
        [("deleted", 0, 4)],
        [("deleted", 0, 4)],
        [("deleted", 0, 2)],
        [("deleted", 0, 11)],
        [("deleted", 0, -1)],
        [("deleted", 1, -1), ("deleted", 1, 0)],
        [("deleted", 1, 0)],
        [("deleted", 7, 0)],
        [("deleted", 0, -2)],
        [("nowhere", 0, 1)],
    ):
        side.run("delete-records", "--offset-json-file", plan(*rows), *side.impatient(), unordered=True)
    side.run("get-offsets", "--topic", "deleted", "--time", "earliest")
    side.run("delete-records", "--offset-json-file", side.file("broken.json", "{"))
    side.run("delete-records", "--offset-json-file", side.file("empty.json", '{"version": 1}'))
    side.run("delete-records", "--offset-json-file", side.file("version.json", '{"version": 7, "partitions": []}'))
    side.run("delete-records")
    side.run("topics", "--create", "--topic", "compact-only", "--config", "cleanup.policy=compact", quiet=True)
    side.produce("compact-only", ["a"], keys=True)
    side.run("delete-records", "--offset-json-file", plan(("compact-only", 0, 1)))


@story("get-offsets", "every form of --time")
def get_offsets(side: Side) -> None:
    side.run("topics", "--create", "--topic", "timed", "--partitions", "3", quiet=True)
    side.produce("timed", ["a", "b", "c"])
    side.produce("timed", ["a"], partition=1)
    for time in (
        "latest",
        "-1",
        "earliest",
        "-2",
        "max-timestamp",
        "-3",
        "earliest-local",
        "-4",
        "latest-tiered",
        "-5",
    ):
        side.run("get-offsets", "--topic", "timed", "--time", time)
    for time in ("0", "1000", "1001", "3000", "3001", "9999999999999", "soon", "-9", "earliest-pending-upload"):
        side.run("get-offsets", "--topic", "timed", "--time", time)
    side.run("get-offsets", "--topic", "timed")
    side.run("get-offsets", "--topic", "timed", "--partitions", "0,2")
    side.run("get-offsets", "--topic-partitions", "timed:0,timed:1-2")
    side.run("get-offsets", "--topic-partitions", "tim.*:0-1")
    side.run("get-offsets", "--topic", "nowhere")
    side.run("get-offsets", "--topic", "timed", "--partitions", "9")
    side.run("get-offsets", "--topic", "timed", "--partitions", "x")
    side.run("get-offsets", "--topic", "timed", "--topic-partitions", "timed:0")
    side.run("get-offsets", "--topic", "timed", "--exclude-internal-topics")


@story("log-dirs", "describe")
def log_dirs(side: Side) -> None:
    side.run("topics", "--create", "--topic", "stored", "--partitions", "2", quiet=True)
    side.produce("stored", ["a", "b"])
    side.run("log-dirs", "--describe", "--topic-list", "stored", "--broker-list", "1")
    side.run("log-dirs", "--describe", "--topic-list", "nowhere")
    side.run("log-dirs", "--describe", "--topic-list", "stored", "--broker-list", "9")
    side.run("log-dirs")
    side.run("log-dirs", "--describe", "--broker-list", "x")
