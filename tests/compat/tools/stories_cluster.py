"""Stories of brokers and replicas: kafka-reassign-partitions, kafka-leader-election,
kafka-metadata-quorum, kafka-cluster, kafka-broker-api-versions, kafka-replica-verification.
"""

from __future__ import annotations

import json

from tests.compat.tools.driver import Ran
from tests.compat.tools.sides import Side
from tests.compat.tools.story import story


def assignment(side: Side, name: str, *rows: tuple[str, int, list[int]]) -> list[str]:
    partitions = [{"topic": topic, "partition": partition, "replicas": replicas} for topic, partition, replicas in rows]
    return ["--reassignment-json-file", side.file(f"{name}.json", json.dumps({"version": 1, "partitions": partitions}))]


def completed(ran: Ran) -> bool:
    """False while the tool sees the move between its two requests: it has queried the replicas
    before, and the reassignment afterwards.
    """
    return "still in progress" not in ran.out and "rather than" not in ran.out


def unthrottled(ran: Ran) -> bool:
    return "throttled" not in ran.out


@story("reassign-partitions", "three brokers: generate, execute, verify", brokers=3)
def reassign(side: Side) -> None:
    side.topic("move", "--replica-assignment", "1:2,2:1")
    side.produce("move", ["a", "b", "c"])
    topics = side.file("topics.json", json.dumps({"version": 1, "topics": [{"topic": "move"}]}))
    generate = ("reassign-partitions", "--topics-to-move-json-file", topics, "--generate")
    side.run(*generate, "--broker-list", "1,2", shape=True)
    side.run(*generate, "--broker-list", "1,9")
    side.run(*generate, "--broker-list", "3", until=lambda ran: True)
    moved = assignment(side, "moved", ("move", 0, [1, 3]), ("move", 1, [3, 1]))
    side.run("reassign-partitions", *moved, "--verify")
    side.run("reassign-partitions", *moved, "--execute")
    side.run("reassign-partitions", *moved, "--verify", until=completed)
    side.run("reassign-partitions", "--list")
    side.run(
        "topics",
        "--describe",
        "--topic",
        "move",
        until=lambda ran: ran.out.count("Isr: 1,3") + ran.out.count("Isr: 3,1") == 2,
    )
    side.run("reassign-partitions", *moved, "--cancel")
    side.run("reassign-partitions", *moved, "--verify")
    more = assignment(side, "more", ("move", 0, [3, 1, 2]))
    side.run("reassign-partitions", *more, "--execute")
    side.run("reassign-partitions", *more, "--verify", until=completed)
    fewer = assignment(side, "fewer", ("move", 0, [2]))
    side.run("reassign-partitions", *fewer, "--execute")
    side.run("reassign-partitions", *fewer, "--verify", until=completed)
    side.run("topics", "--describe", "--topic", "move", until=lambda ran: "Leader: 2" in ran.out)


@story("reassign-partitions", "three brokers: throttles; verify and cancel during a move", brokers=3)
def reassign_throttled(side: Side) -> None:
    side.topic("slow", "--replica-assignment", "1:2")
    side.produce("slow", ["x" * 10_000] * 300)
    moved = assignment(side, "slow", ("slow", 0, [1, 3]))
    side.run(
        "reassign-partitions",
        *moved,
        "--execute",
        "--throttle",
        "20000",
        "--replica-alter-log-dirs-throttle",
        "5000000",
    )
    side.run("configs", "--topic", "slow", "--describe", unordered=True)
    side.run("configs", "--broker", "3", "--describe", unordered=True)
    side.run("reassign-partitions", *moved, "--verify")
    side.run("reassign-partitions", "--list")
    side.run("topics", "--describe", "--topic", "slow")
    side.run("reassign-partitions", *moved, "--execute")
    side.run("reassign-partitions", *moved, "--execute", "--additional", "--throttle", "1000")
    side.run("reassign-partitions", *moved, "--verify", "--preserve-throttles")
    side.run("reassign-partitions", *moved, "--cancel")
    side.run("reassign-partitions", "--list")
    side.run("configs", "--topic", "slow", "--describe", unordered=True, until=unthrottled)
    side.run("configs", "--broker", "3", "--describe", unordered=True, until=unthrottled)
    side.run("topics", "--describe", "--topic", "slow")
    side.run("reassign-partitions", *moved, "--execute", "--throttle", "100000000")
    side.run("reassign-partitions", *moved, "--verify", until=completed)
    side.run("configs", "--topic", "slow", "--describe", unordered=True, until=unthrottled)


@story("reassign-partitions", "three brokers: what is refused", brokers=3)
def reassign_refused(side: Side) -> None:
    side.topic("stay", "--replica-assignment", "1:2")
    for name, rows in {
        "unknown broker": [("stay", 0, [1, 9])],
        "unknown partition": [("stay", 7, [1, 2])],
        "unknown topic": [("nowhere", 0, [1, 2])],
        "no replicas": [("stay", 0, [])],
        "twice": [("stay", 0, [1, 1])],
        "two rows": [("stay", 0, [1, 2]), ("stay", 0, [1, 3])],
        "negative": [("stay", 0, [-1])],
    }.items():
        plan = assignment(side, name.replace(" ", "-"), *rows)
        for words in (("--execute",), ("--verify",), ("--cancel",)):
            side.run("reassign-partitions", *plan, *words, *side.impatient())
    side.run("reassign-partitions", "--reassignment-json-file", side.file("broken.json", "{"), "--execute")
    side.run(
        "reassign-partitions",
        "--reassignment-json-file",
        side.file("none.json", '{"version": 1, "partitions": []}'),
        "--execute",
    )
    side.run("reassign-partitions", "--execute")
    side.run("reassign-partitions", "--generate")
    side.run("reassign-partitions")
    side.run("topics", "--describe", "--topic", "stay")


@story("leader-election", "three brokers: preferred and unclean", brokers=3)
def elections(side: Side) -> None:
    side.topic("elect", "--replica-assignment", "3:1:2,1:2:3", "--config", "min.insync.replicas=1")
    election = ("leader-election", "--topic", "elect")
    side.run(*election, "--partition", "0", "--election-type", "preferred")
    side.stop(3)
    side.run("topics", "--describe", "--topic", "elect", until=lambda ran: "Leader: 3" not in ran.out)
    side.run(*election, "--partition", "0", "--election-type", "preferred")
    side.run(*election, "--partition", "0", "--election-type", "unclean")
    side.start(3)
    side.run("topics", "--describe", "--topic", "elect", until=lambda ran: ran.out.count("Isr: 1,2,3") == 2)
    side.run(
        *election,
        "--partition",
        "0",
        "--election-type",
        "preferred",
        until=lambda ran: "valid replica" in ran.out or "Success" in ran.out,
    )
    side.run(*election, "--partition", "9", "--election-type", "preferred")
    side.run("leader-election", "--topic", "nowhere", "--partition", "0", "--election-type", "preferred")
    side.run("leader-election", "--all-topic-partitions", "--election-type", "preferred", quiet=True)
    side.run("leader-election", "--all-topic-partitions", "--election-type", "preferred")
    plan = side.file(
        "elect.json",
        json.dumps({"partitions": [{"topic": "elect", "partition": 0}, {"topic": "elect", "partition": 1}]}),
    )
    side.run("leader-election", "--path-to-json-file", plan, "--election-type", "preferred")
    side.run("leader-election", "--path-to-json-file", side.file("bad.json", "{"), "--election-type", "preferred")
    side.run("leader-election", "--topic", "elect", "--election-type", "preferred")
    side.run("leader-election", "--topic", "elect", "--partition", "0", "--election-type", "lucky")
    side.run("leader-election")
    side.run("topics", "--describe", "--topic", "elect", until=lambda ran: "Leader: 3" in ran.out)


@story("log-dirs", "three brokers", brokers=3)
def log_dirs_three(side: Side) -> None:
    side.topic("spread", "--replica-assignment", "1:2:3")
    side.produce("spread", ["a"] * 10)
    side.run("log-dirs", "--describe", "--topic-list", "spread", until=lambda ran: ran.out.count('"offsetLag":0') == 3)
    side.run("log-dirs", "--describe", "--topic-list", "spread", "--broker-list", "2,3")


@story("metadata-quorum", "status and replication")
def quorum(side: Side) -> None:
    side.run("metadata-quorum", "describe", "--status", shape=True)
    side.run("metadata-quorum", "describe", "--replication", shape=True)
    side.run("metadata-quorum", "describe", "--replication", "--human-readable", shape=True)
    side.run("metadata-quorum", "describe")
    side.run(
        "metadata-quorum",
        "remove-controller",
        "--controller-id",
        "9",
        "--controller-directory-id",
        "AAAAAAAAAAAAAAAAAAAAAQ",
    )
    side.run("metadata-quorum")


@story("metadata-quorum", "three brokers: status and replication", brokers=3)
def quorum_three(side: Side) -> None:
    side.run("metadata-quorum", "describe", "--status", shape=True)
    side.run("metadata-quorum", "describe", "--replication", shape=True)


@story("cluster", "cluster id, endpoints, unregister")
def cluster(side: Side) -> None:
    side.run("cluster", "cluster-id", "--bootstrap-server", "{bootstrap}", bootstrap=False)
    side.run("cluster", "list-endpoints", "--bootstrap-server", "{bootstrap}", bootstrap=False)
    side.run(
        "cluster", "list-endpoints", "--include-fenced-brokers", "--bootstrap-server", "{bootstrap}", bootstrap=False
    )
    side.run("cluster", "unregister", "--id", "9", "--bootstrap-server", "{bootstrap}", bootstrap=False)
    side.run("cluster", "unregister", "--bootstrap-server", "{bootstrap}", bootstrap=False)
    side.run("cluster", bootstrap=False)


@story("cluster", "three brokers: a fenced one, unregister", brokers=3)
def cluster_three(side: Side) -> None:
    side.run("cluster", "list-endpoints", "--bootstrap-server", "{bootstrap}", bootstrap=False)
    side.stop(3)
    listed = ("cluster", "list-endpoints", "--bootstrap-server", "{bootstrap}")
    side.run(*listed, bootstrap=False, until=lambda ran: len(ran.out.splitlines()) == 3)
    side.run(*listed, "--include-fenced-brokers", bootstrap=False)
    side.start(3)
    side.run(*listed, bootstrap=False, until=lambda ran: len(ran.out.splitlines()) == 4)


@story("broker-api-versions", "a single broker")
def api_versions(side: Side) -> None:
    side.run("broker-api-versions")
    side.run("broker-api-versions", "--no-such-option")


@story("replica-verification", "three brokers", brokers=3)
def verification(side: Side) -> None:
    side.topic("verified", "--replica-assignment", "1:2:3")
    side.produce("verified", ["a"] * 10)
    words = ("--broker-list", "{bootstrap}", "--topics-include", "verified", "--report-interval-ms", "500")
    side.run("replica-verification", *words, bootstrap=False, shape=True, shown=second_report, enough=reported_twice)


def second_report(text: str) -> str:
    """It never ends; from its second report on it has checked every replica."""
    return [line for line in text.splitlines() if "max lag" in line][1] if reported_twice(text) else text


def reported_twice(text: str) -> bool:
    return text.count("max lag") > 1
