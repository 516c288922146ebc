"""Stories of groups: kafka-consumer-groups, kafka-groups, kafka-streams-application-reset, share and
streams groups.
"""

from __future__ import annotations

import re

from mqd.protocol.messages import StreamsGroupHeartbeatRequest
from tests.compat.tools.sides import Side
from tests.compat.tools.story import story
from tests.kafka_connection import KafkaConnection

STREAMS_HEARTBEAT = 88


def committed(side: Side, group: str, topic: str, offset: int) -> None:
    """A group without members that has committed `offset` of partition 0."""
    side.topic(topic, "--partitions", "2")
    side.produce(topic, [f"v{n}" for n in range(10)])
    reset = ("--group", group, "--topic", f"{topic}:0", "--reset-offsets", "--execute")
    ran = side.run("consumer-groups", *reset, "--to-offset", str(offset), quiet=True)
    assert ran.code == 0, ran


@story("consumer-groups", "an empty group: list, describe, delete")
def groups_empty(side: Side) -> None:
    committed(side, "empty", "of-empty", 4)
    side.run("consumer-groups", "--list", until=lambda ran: "empty" in ran.out, unordered=True)
    side.run("consumer-groups", "--list", "--state", unordered=True)
    side.run("consumer-groups", "--list", "--state", "Stable")
    side.run("consumer-groups", "--list", "--state", "Empty,Dead", unordered=True)
    side.run("consumer-groups", "--list", "--state", "Happy", unordered="words")
    side.run("consumer-groups", "--list", "--type", unordered=True)
    side.run("consumer-groups", "--list", "--type", "consumer", unordered=True)
    side.run("consumer-groups", "--list", "--type", "classic", "--state", "Empty", unordered=True)
    side.run("consumer-groups", "--describe", "--group", "empty")
    side.run("consumer-groups", "--describe", "--group", "empty", "--offsets", "--verbose")
    side.run("consumer-groups", "--describe", "--group", "empty", "--members")
    side.run("consumer-groups", "--describe", "--group", "empty", "--members", "--verbose")
    side.run("consumer-groups", "--describe", "--group", "empty", "--state")
    side.run("consumer-groups", "--describe", "--group", "empty", "--state", "--verbose")
    side.run("consumer-groups", "--describe", "--all-groups", "--state", unordered=True)
    side.run("consumer-groups", "--delete", "--group", "empty")
    side.run("consumer-groups", "--describe", "--group", "empty")
    side.run("consumer-groups", "--delete", "--group", "empty")


@story("consumer-groups", "reset offsets by every option")
def groups_reset(side: Side) -> None:
    committed(side, "reset", "of-reset", 5)
    of = ("--group", "reset", "--topic", "of-reset", "--reset-offsets")
    for where in (
        ("--to-earliest",),
        ("--to-latest",),
        ("--to-current",),
        ("--to-offset", "3"),
        ("--to-offset", "99"),
        ("--to-offset", "-5"),
        ("--shift-by", "2"),
        ("--shift-by", "-2"),
        ("--shift-by", "100"),
        ("--shift-by", "-100"),
        ("--to-datetime", "1970-01-01T00:00:05.000"),
        ("--to-datetime", "2200-01-01T00:00:00.000"),
        ("--to-datetime", "yesterday"),
        ("--by-duration", "PT0H1M"),
        ("--by-duration", "a while"),
    ):
        side.run("consumer-groups", *of, *where, "--dry-run", unordered=True)
    for where in (
        ("--shift-by", "-2"),
        ("--to-datetime", "1970-01-01T00:00:05.000"),
        ("--to-latest",),
        ("--to-earliest",),
    ):
        side.run("consumer-groups", *of, *where, "--execute", unordered=True)
        side.run("consumer-groups", "--describe", "--group", "reset", unordered=True)
    side.run("consumer-groups", *of, "--to-latest", unordered=True)
    side.run("consumer-groups", *of, "--to-latest", "--dry-run", "--execute")
    exported = side.run("consumer-groups", *of, "--to-offset", "6", "--dry-run", "--export", unordered=True)
    plan = side.file("plan.csv", "".join(sorted(line + "\n" for line in exported.out.splitlines() if "," in line)))
    side.run("consumer-groups", "--group", "reset", "--reset-offsets", "--from-file", plan, "--execute", unordered=True)
    side.run(
        "consumer-groups",
        "--group",
        "reset",
        "--reset-offsets",
        "--all-topics",
        "--to-earliest",
        "--execute",
        unordered=True,
    )
    side.run(
        "consumer-groups", "--group", "reset", "--topic", "of-reset:0", "--reset-offsets", "--to-latest", "--execute"
    )
    side.run(
        "consumer-groups",
        "--group",
        "reset",
        "--topic",
        "of-reset:7",
        "--reset-offsets",
        "--to-latest",
        "--execute",
        *side.impatient(),
    )
    side.run(
        "consumer-groups",
        "--group",
        "reset",
        "--topic",
        "nowhere",
        "--reset-offsets",
        "--to-latest",
        "--execute",
        *side.impatient(),
    )
    side.run(
        "consumer-groups",
        "--group",
        "fresh",
        "--topic",
        "of-reset",
        "--reset-offsets",
        "--to-earliest",
        "--execute",
        unordered=True,
    )
    side.run(
        "consumer-groups",
        "--all-groups",
        "--topic",
        "of-reset",
        "--reset-offsets",
        "--to-latest",
        "--dry-run",
        unordered=True,
    )
    side.run("consumer-groups", "--group", "reset", "--delete-offsets", "--topic", "of-reset:0")
    side.run("consumer-groups", "--group", "reset", "--delete-offsets", "--topic", "of-reset", unordered=True)
    side.run("consumer-groups", "--group", "reset", "--delete-offsets", "--topic", "nowhere", *side.impatient())
    side.run("consumer-groups", "--group", "nobody", "--delete-offsets", "--topic", "of-reset")
    for group in ("reset", "fresh"):
        side.run("consumer-groups", "--delete", "--group", group)


def with_members(side: Side, protocol: str) -> None:
    topic, group = f"of-{protocol}", f"live-{protocol}"
    side.topic(topic, "--partitions", "2")
    side.produce(topic, ["a", "b", "c"])
    member = side.member(group, [topic], **{"group.protocol": protocol})
    message = member.poll(20)
    assert message is not None and message.error() is None, message
    member.commit(asynchronous=False)
    described = ("consumer-groups", "--describe", "--group", group)
    ran = side.run(*described, "--members", quiet=True)
    for word in ran.out.split():
        if word.startswith("member-") or (protocol == "consumer" and len(word) in (22, 36)):
            side.names(word, "MEMBER")
    side.run(*described, unordered=True)
    side.run(*described, "--members")
    side.run(*described, "--members", "--verbose")
    side.run(*described, "--state")
    side.run(*described, "--state", "--verbose")
    side.run(*described, "--offsets", "--verbose", unordered=True)
    side.run("consumer-groups", "--list", "--state", "Stable")
    side.run("consumer-groups", "--list", "--type", protocol, unordered=True)
    side.run("consumer-groups", "--delete", "--group", group)
    side.run("consumer-groups", "--group", group, "--reset-offsets", "--all-topics", "--to-earliest", "--execute")
    side.run("consumer-groups", "--group", group, "--delete-offsets", "--topic", topic, unordered=True)
    member.close()
    side.run(*described, until=lambda ran: "no active members" in ran.err + ran.out, unordered=True)
    side.run("consumer-groups", "--delete", "--group", group)


@story("consumer-groups", "a group of the classic protocol with a member")
def groups_classic(side: Side) -> None:
    with_members(side, "classic")


@story("consumer-groups", "a group of the consumer protocol (KIP-848) with a member")
def groups_consumer(side: Side) -> None:
    with_members(side, "consumer")


@story("consumer-groups", "a group that does not exist, invalid arguments")
def groups_missing(side: Side) -> None:
    for words in (
        ("--describe", "--group", "nobody"),
        ("--describe", "--group", "nobody", "--members"),
        ("--describe", "--group", "nobody", "--state"),
        ("--delete", "--group", "nobody"),
        ("--describe", "--group", "nobody", "--offsets", "--state"),
        ("--describe",),
        ("--delete",),
        ("--group", "x", "--reset-offsets", "--to-earliest"),
        ("--group", "x", "--reset-offsets", "--topic", "t"),
        ("--group", "x", "--reset-offsets", "--topic", "t", "--to-earliest", "--to-latest"),
        ("--list", "--describe"),
        ("--validate-regex", "a.*b"),
        ("--validate-regex", "a(b"),
        (),
    ):
        side.run("consumer-groups", *words, unordered="words")


@story("groups", "list, filter")
def all_groups(side: Side) -> None:
    committed(side, "listed", "of-listed", 1)
    member = side.member("listed-848", ["of-listed"], **{"group.protocol": "consumer"})
    listed = ("groups", "--list")
    side.run(*listed, unordered=True)
    side.run(*listed, "--group-type", "classic", unordered=True)
    side.run(*listed, "--group-type", "consumer")
    side.run(*listed, "--group-type", "share")
    side.run(*listed, "--group-type", "streams")
    side.run(*listed, "--group-type", "odd")
    side.run(*listed, "--protocol", "consumer", unordered=True)
    side.run(*listed, "--protocol", "connect")
    side.run(*listed, "--consumer", unordered=True)
    side.run(*listed, "--share")
    side.run("groups")
    member.close()
    for group in ("listed", "listed-848"):
        side.run("consumer-groups", "--delete", "--group", group, until=lambda ran: "success" in ran.out)


@story("share-groups", "list, describe")
def share_groups(side: Side) -> None:
    side.run("share-groups", "--list")
    side.run("share-groups", "--describe", "--group", "nobody")
    side.run("share-groups", "--delete", "--group", "nobody")
    side.run("share-groups", "--describe")


@story("share-groups", "a group: list, describe, reset and delete offsets")
def share_group(side: Side) -> None:
    of, group = ("--topic", "of-sharers"), ("--group", "sharers")
    side.topic("of-sharers", "--partitions", "2")
    side.produce("of-sharers", [f"v{n}" for n in range(10)])
    begin_at_first_record(side, "sharers")
    side.run("console-share-consumer", *of, *group, "--max-messages", "10", "--timeout-ms", "30000", seconds=40)
    side.run("share-groups", "--list", until=lambda ran: "sharers" in ran.out)
    side.run("share-groups", "--list", "--state", until=lambda ran: "Empty" in ran.out)
    side.run("share-groups", "--list", "--state", "Stable")
    side.run("share-groups", "--describe", *group, until=lambda ran: "10" in ran.out, unordered=True)
    side.run("share-groups", "--describe", *group, "--offsets", "--verbose", unordered=True)
    side.run("share-groups", "--describe", *group, "--members")
    side.run("share-groups", "--describe", *group, "--state", "--verbose")
    for where in (("--to-earliest",), ("--to-datetime", "1970-01-01T00:00:05.000"), ("--to-latest",)):
        side.run("share-groups", *group, *of, "--reset-offsets", *where, "--dry-run", unordered=True)
        side.run("share-groups", *group, *of, "--reset-offsets", *where, "--execute", unordered=True)
        side.run("share-groups", "--describe", *group, "--offsets", unordered=True)
    side.run("share-groups", *group, "--reset-offsets", "--topic", "nowhere", "--to-earliest", "--execute")
    side.run("share-groups", *group, "--reset-offsets", *of)
    side.run("share-groups", "--delete-offsets", *group, "--topic", "nowhere")
    side.run("share-groups", "--delete-offsets", *group, *of)
    side.run("share-groups", "--describe", *group)
    side.run("share-groups", "--delete", *group)
    side.run("share-groups", "--list")


def begin_at_first_record(side: Side, group: str) -> None:
    entity = ("--entity-type", "groups", "--entity-name", group)
    side.run("configs", "--alter", *entity, "--add-config", "share.auto.offset.reset=earliest", quiet=True)


@story("console-share-consumer", "reads a topic")
def share_consumer(side: Side) -> None:
    side.topic("shared")
    side.run("console-share-consumer", "--topic", "shared", "--group", "sharing", "--timeout-ms", "3000", seconds=20)
    begin_at_first_record(side, "answering")
    side.produce("shared", [f"v{n}" for n in range(6)], keys=True)
    read = ("console-share-consumer", "--topic", "shared", "--group", "answering", "--timeout-ms", "30000")
    shown = [word for name in ("key", "offset", "delivery") for word in ("--formatter-property", f"print.{name}=true")]
    side.run(*read, *shown, "--release", "--max-messages", "6", seconds=40)
    side.run(*read, *shown, "--reject", "--max-messages", "2", seconds=40)
    side.run(*read, *shown, "--max-messages", "4", seconds=40)
    side.run(*read, "--release", "--reject")
    side.run("console-share-consumer", "--topic", "shared", "--group", "answering", "--timeout-ms", "3000", seconds=20)


@story("console-consumer", "the states of a share group")
def share_states(side: Side) -> None:
    side.topic("of-states")
    begin_at_first_record(side, "stateful")
    side.produce("of-states", [f"v{n}" for n in range(6)])
    read = ("console-share-consumer", "--topic", "of-states", "--group", "stateful", "--timeout-ms", "30000")
    side.run(*read, "--release", "--max-messages", "6", seconds=40)
    side.run(*read, "--reject", "--max-messages", "2", seconds=40)
    formatters = {
        "__share_group_state": "group.share.ShareGroupStateMessageFormatter",
        "__consumer_offsets": "ShareGroupMessageFormatter",
    }
    for topic, name in formatters.items():
        words = ("--formatter", f"org.apache.kafka.tools.consumer.{name}", "--timeout-ms", "5000")
        side.run("console-consumer", "--topic", topic, "--from-beginning", *words, shown=last_of_each_type)


def last_of_each_type(text: str) -> str:
    """The last output of a formatter, which ends no line, for the group `stateful`, by type of the
    key. Each broker has its own hash of topics. An update may name the start or -1, the previous
    one.
    """
    found, start = {}, "-1"
    text = re.sub(r'"metadataHash":-?[0-9]+', '"metadataHash":OWN', text)
    for entry in text.replace('}{"key"', '}\n{"key"').splitlines():
        if "stateful" not in entry:
            continue
        if (named := re.search(r'"startOffset":([0-9]+)', entry)) is not None:
            start = named[1]
        found[entry[: entry.index(",")]] = entry.replace('"startOffset":-1', f'"startOffset":{start}')
    return "\n".join(found[key] for key in sorted(found))


def in_order_of_offsets(text: str) -> str:
    """Java's sets have a different order in each process."""
    return re.sub(
        r'"offsets":\[([0-9,]*)\]', lambda found: f'"offsets":[{",".join(sorted(found[1].split(","), key=int))}]', text
    )


@story("verifiable-share-consumer", "each way to acknowledge")
def verifiable_share_consumer(side: Side) -> None:
    side.topic("verify-shared")
    side.produce("verify-shared", [f"v{n}" for n in range(20)])
    for mode in ("auto", "sync", "async"):
        words = ("--max-messages", "20", "--acknowledgement-mode", mode, "--offset-reset-strategy", "earliest")
        side.run(
            "verifiable-share-consumer",
            *("--topic", "verify-shared", "--group-id", f"verified-{mode}", *words),
            unordered=True,
            shown=in_order_of_offsets,
        )
    side.run("verifiable-share-consumer", "--topic", "verify-shared")


@story("streams-groups", "list, describe")
def streams_groups(side: Side) -> None:
    side.run("streams-groups", "--list")
    side.run("streams-groups", "--describe", "--group", "nobody")


@story("streams-groups", "a group: list, describe, reset offsets, delete")
def streams_group(side: Side) -> None:
    group = ("--group", "streamers")
    committed(side, "streamers", "of-streams", 2)
    streams_heartbeat(side, "streamers", "of-streams", 0)
    side.run("streams-groups", "--list")
    side.run("streams-groups", "--list", "--state")
    side.run("groups", "--list", "--group-type", "streams")
    side.run("streams-groups", "--describe", *group, unordered=True)
    for what in ("--members", "--state", "--offsets"):
        side.run("streams-groups", "--describe", *group, what, unordered=True)
        side.run("streams-groups", "--describe", *group, what, "--verbose", unordered=True)
    side.run("streams-groups", "--delete", *group)
    streams_heartbeat(side, "streamers", "of-streams", -1)
    side.run("streams-groups", "--list", "--state")
    side.run("streams-groups", "--describe", *group, "--state")
    reset = ("--reset-offsets", "--input-topic", "of-streams", "--to-earliest")
    side.run("streams-groups", *group, *reset, "--dry-run", unordered=True)
    side.run("streams-groups", *group, *reset, "--execute", unordered=True)
    side.run("streams-groups", "--describe", *group, "--offsets", unordered=True)
    side.run("streams-groups", "--delete", *group)
    side.run("streams-groups", "--list")


def streams_heartbeat(side: Side, group: str, topic: str, epoch: int) -> None:
    """A member whose topology reads `topic`, without state, joins (0) or leaves (-1)."""
    request = StreamsGroupHeartbeatRequest(group_id=group, member_id="a-member", member_epoch=epoch)
    if epoch == 0:
        subtopology = StreamsGroupHeartbeatRequest.Subtopology(subtopology_id="0", source_topics=[topic])
        request.topology = StreamsGroupHeartbeatRequest.Topology(epoch=1, subtopologies=[subtopology])
        request.rebalance_timeout_ms, request.process_id = 60_000, "a-process"
        request.active_tasks, request.standby_tasks, request.warmup_tasks = [], [], []
    host, _, port = side.bootstrap.rpartition(":")
    with KafkaConnection(host, int(port)) as kafka:
        response = kafka.call(STREAMS_HEARTBEAT, 0, request)
    assert not response.error_code, response


@story("streams-application-reset", "input topics, internal topics, dry run")
def streams_reset(side: Side) -> None:
    side.topic("app-in", "--partitions", "2")
    side.topic("app-store-changelog")
    side.topic("app-x-repartition")
    side.produce("app-in", ["a", "b", "c"])
    committed_words = ("--group", "app", "--topic", "app-in", "--reset-offsets", "--to-latest", "--execute")
    side.run("consumer-groups", *committed_words, quiet=True)
    reset = ("streams-application-reset", "--application-id", "app")
    side.run(*reset, "--input-topics", "app-in", "--dry-run", unordered=True)
    side.run("consumer-groups", "--describe", "--group", "app", unordered=True)
    side.run(*reset, "--input-topics", "app-in", "--to-offset", "1", "--dry-run", unordered=True)
    side.run(*reset, "--input-topics", "app-in", "--shift-by", "-1", unordered=True)
    side.run(
        *reset, "--input-topics", "app-in", "--internal-topics", "app-store-changelog", "--dry-run", unordered=True
    )
    side.run(*reset, "--input-topics", "nowhere", unordered=True)
    side.run(*reset, "--input-topics", "app-in", unordered=True)
    side.run("consumer-groups", "--describe", "--group", "app", unordered=True)
    side.run("topics", "--list", "--topic", "app-.*", until=lambda ran: "changelog" not in ran.out)
    side.run("streams-application-reset")
    side.run("consumer-groups", "--delete", "--group", "app")
