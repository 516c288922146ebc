"""`mqd group` against a real broker and real members: listing, the member that delays a rebalance,
and seeking.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from mqd import AcknowledgeType, ShareConsumer
from mqd.cli.broker_lookup import Cluster
from mqd.cli.group_listing import all_groups
from mqd.spark.driver import Driver
from mqd.spark.options import source_options
from tests.broker import Broker
from tests.interaction.command_line import CommandLine
from tests.interaction.share_members import begin_at_first_record, configure_group
from tests.interaction.traffic import create_topic, eventually
from tests.interaction.transactional import connect, fresh


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp("cli-group") / "data", config={"group.initial.rebalance.delay.ms": "0"}
    ) as running:
        yield running


@pytest.fixture
def mqd(broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(broker, monkeypatch, capfdbinary)


@pytest.fixture
def topic(broker: Broker) -> str:
    """Three partitions of ten records each, with the timestamps 1000, 2000 ... 10000."""
    name = fresh("flights")
    with connect(broker) as kafka:
        create_topic(kafka, name, 3)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(30):
        producer.produce(name, b"value", partition=number % 3, timestamp=1000 * (number // 3 + 1))
    assert producer.flush(60) == 0
    return name


@pytest.fixture
def member(broker: Broker) -> Iterator[Callable[..., Consumer]]:
    """member("group", "topic", "client id") -> a consumer that has joined the group once it has
    polled.
    """
    members: list[Consumer] = []

    def join(group: str, topic: str, client: str, **config: object) -> Consumer:
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "client.id": client,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = Consumer(settings | config)
        consumer.subscribe([topic])
        members.append(consumer)
        return consumer

    yield join
    for consumer in members:
        consumer.close()


def poll_until_assigned(consumer: Consumer) -> None:
    eventually(lambda: consumer.poll(0.05) is not None or consumer.assignment(), "an assignment")
    eventually(lambda: consumer.poll(0.05) is None or consumer.assignment(), "an assignment")


def commit(broker: Broker, group: str, topic: str, offsets: dict[int, int]) -> None:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    consumer.commit(
        offsets=[TopicPartition(topic, index, offset) for index, offset in offsets.items()], asynchronous=False
    )
    consumer.close()


def offsets_of(mqd: CommandLine, group: str) -> dict[int, int]:
    return {one["partition"]: one["committed_offset"] for one in mqd.json("group", "describe", group)["partitions"]}


# -- list and describe --------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_and_its_members(mqd: CommandLine, broker: Broker, topic: str, member, protocol: str) -> None:
    group = fresh("billing")
    consumer = member(group, topic, "app-1", **{"group.protocol": protocol})
    poll_until_assigned(consumer)
    consumer.commit(offsets=[TopicPartition(topic, 1, 4)], asynchronous=False)
    assert group in mqd("group", "list")[1].splitlines()
    listed = {one["group"]: one for one in mqd.json("group", "list", "--type", protocol, "--state", "stable")}
    assert (listed[group]["type"], listed[group]["state"], listed[group]["members"]) == (protocol, "Stable", 1)
    other = "consumer" if protocol == "classic" else "classic"
    assert group not in mqd("group", "list", "--type", other)[1].splitlines()
    assert group not in mqd("group", "list", "--state", "Empty")[1].splitlines()
    found = mqd.json("group", "describe", group)
    assert (found["type"], found["state"], found["rebalance"], found["lag"]) == (protocol, "Stable", None, 6)
    (one,) = found["members"]
    assert (one["client_id"], one["host"], one["assignment"]) == ("app-1", "127.0.0.1", {topic: [0, 1, 2]})
    assert [
        (row["partition"], row["committed_offset"], row["log_end_offset"], row["lag"]) for row in found["partitions"]
    ] == [(0, None, 10, None), (1, 4, 10, 6), (2, None, 10, None)]
    assert {row["member_id"] for row in found["partitions"]} == {one["member_id"]}
    code, out, _ = mqd("group", "describe", group)
    assert code == 0 and f"group {group}: Stable, 1 member, {protocol} protocol" in out and f"{topic}:0-2" in out


def test_advice_for_a_group_that_reads_nothing(mqd: CommandLine, topic: str, member) -> None:
    group = fresh("idle")
    consumer = member(group, topic, "idle-app")
    poll_until_assigned(consumer)
    consumer.commit(offsets=[TopicPartition(topic, index, 0) for index in range(3)], asynchronous=False)
    found = mqd.json("group", "advise", group, "--seconds", "0.1")
    assert (found["members"], found["partitions"], found["lag"]) == (1, 3, 30)
    assert found["lines"][0].startswith("nothing was committed within 0 s, though 30 records wait")
    code, out, _ = mqd("group", "advise", group, "--seconds", "0.1")
    assert code == 0 and f"group {group}: 1 member, 3 partitions, lag 30; 0 records/s written, 0 read" in out
    code, _, error = mqd("group", "advise", "nowhere", "--seconds", "0.1")
    assert code == 1 and "there is no group nowhere" in error


def delaying_members(broker: Broker, group: str) -> list[str]:
    """The members that delay the group, as `mqd doctor` and the console see them."""
    with Cluster(broker.bootstrap) as cluster:
        (found,) = [one.rebalance for one in all_groups(cluster) if one.group == group]
    assert found is not None and found.elapsed_ms >= 0
    return [one.client_id for one in found.held_up_by]


def test_describe_names_the_member_that_holds_up_a_rebalance(
    mqd: CommandLine, broker: Broker, topic: str, member
) -> None:
    group = fresh("held")
    slow = member(group, topic, "slow-app")
    poll_until_assigned(slow)
    new = member(group, topic, "new-app")

    def look():
        new.poll(0.05)  # joins; slow-app, which does not poll, does not notice
        found = mqd.json("group", "describe", group)
        return found if found["rebalance"] and found["rebalance"]["held_up_by"] else None

    first = eventually(look, "a rebalance that is held up")
    (holder,) = first["rebalance"]["held_up_by"]
    assert (first["state"], holder["client_id"], holder["host"], holder["waited_for"]) == (
        "PreparingRebalance",
        "slow-app",
        "127.0.0.1",
        "join",
    )
    assert "joined" in first["rebalance"]["reason"]
    second = look()["rebalance"]
    assert (
        second["elapsed_ms"] >= first["rebalance"]["elapsed_ms"] >= 0
        and second["held_up_by"][0]["waited_ms"] >= holder["waited_ms"] >= 0
    )
    assert delaying_members(broker, group) == ["slow-app"]
    code, out, _ = mqd("group", "describe", group)
    assert code == 0 and "rebalancing for " in out and "held up by:" in out
    assert any(line.startswith("slow-app  127.0.0.1  to join again") for line in out.splitlines())
    deadline = time.monotonic() + 60
    while mqd.json("group", "describe", group)["state"] != "Stable":
        assert time.monotonic() < deadline
        slow.poll(0.05)
        new.poll(0.05)
    assert mqd.json("group", "describe", group)["rebalance"] is None


def test_a_member_that_does_not_release_partitions_is_named(
    mqd: CommandLine, broker: Broker, topic: str, member
) -> None:
    """The consumer protocol: others wait only for this member's partitions."""
    group = fresh("kept")
    slow = member(group, topic, "slow-app", **{"group.protocol": "consumer"})
    poll_until_assigned(slow)
    new = member(group, topic, "new-app", **{"group.protocol": "consumer"})

    def look():
        new.poll(0.05)
        found = mqd.json("group", "describe", group)["rebalance"]
        return found["held_up_by"] if found else None

    (holder,) = eventually(look, "a rebalance that is held up")
    assert holder["client_id"] == "slow-app" and holder["waited_for"] in ("revocation", "heartbeat")
    assert delaying_members(broker, group) == ["slow-app"]


def test_missing_groups_and_topics_are_reported(mqd: CommandLine) -> None:
    code, out, error = mqd("group", "describe", "nobody")
    assert (code, out, error) == (1, "", "mqd: there is no group nobody; mqd group list shows all groups\n")
    code, _, error = mqd("group", "delete", "nobody")
    assert code == 1 and "there is no group nobody" in error and "--if-exists" in error
    assert mqd("group", "delete", "nobody", "--if-exists") == (0, "", "")
    code, _, error = mqd("group", "seek", "nobody", "--to", "earliest", "--execute")
    assert code == 1 and "there is no group nobody" in error
    assert mqd("group", "list", "-b", "127.0.0.1:1")[0] == 3
    assert mqd("group", "list", "--state", "asleep")[0] == 2


def test_an_offset_beyond_the_log(mqd: CommandLine, broker: Broker, topic: str) -> None:
    """As after records were lost elsewhere: reported, and not counted as a negative lag."""
    group = fresh("stale")
    commit(broker, group, topic, {0: 3, 1: 25})
    rows = {row["partition"]: row for row in mqd.json("group", "describe", group)["partitions"]}
    assert (rows[0]["lag"], rows[0]["note"], rows[1]["lag"], rows[1]["note"]) == (7, None, 0, "beyond the log's end")


def scraped(broker: Broker) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=60) as response:
        return response.read().decode()


def metrics_of(broker: Broker, group: str, topic: str) -> dict[tuple[str, str | None], float]:
    """By name and partition."""
    return {
        (sample.name, sample.labels.get("partition")): sample.value
        for family in text_string_to_metric_families(scraped(broker))
        for sample in family.samples
        if sample.labels.get("consumergroup") == group and sample.labels.get("topic", topic) == topic
    }


def test_lag_and_members_are_metrics(mqd: CommandLine, broker: Broker, topic: str, member) -> None:
    """With the names of kafka_exporter."""
    group = fresh("measured")
    consumer = member(group, topic, "app-1")
    poll_until_assigned(consumer)
    consumer.commit(offsets=[TopicPartition(topic, 0, 4), TopicPartition(topic, 2, 10)], asynchronous=False)
    found = metrics_of(broker, group, topic)
    # the first uncommitted record of partition 0 is the fifth, with the timestamp 5,000 ms
    assert time.time() - 30 < found.pop(("mqd_consumergroup_lag_seconds", "0")) + 5 < time.time()
    assert found.pop(("mqd_consumergroup_lag_seconds", "2")) == 0
    assert found == {
        ("kafka_consumergroup_current_offset", "0"): 4,
        ("kafka_consumergroup_current_offset", "2"): 10,
        ("kafka_consumergroup_lag", "0"): 6,
        ("kafka_consumergroup_lag", "2"): 0,
        ("kafka_consumergroup_lag_sum", None): 6,
        ("kafka_consumergroup_members", None): 1,
        ("mqd_consumergroup_rebalance_seconds", None): 0,
    }
    assert "mqd_consumergroup_partitions_not_exported 0.0" in scraped(broker).splitlines()


def test_a_share_group_has_a_lag_too(broker: Broker, topic: str) -> None:
    """One record is released and waits to be delivered again: its age is the group's lag."""
    group = fresh("sharing")
    begin_at_first_record(broker.bootstrap, group)
    configure_group(broker.bootstrap, group, "share.retry.backoff.ms", "60000")
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": group, "share.acknowledgement.mode": "explicit"}
    with ShareConsumer(settings) as consumer:
        consumer.subscribe([topic])
        count = 0
        while count < 30:
            for message in consumer.poll(1.0):
                count += 1
                is_fifth = (message.partition(), message.offset()) == (0, 4)
                consumer.acknowledge(message, AcknowledgeType.RELEASE if is_fifth else AcknowledgeType.ACCEPT)
            consumer.commit_sync()
        found = eventually(
            lambda: (
                (of_now := metrics_of(broker, group, topic)).get(("kafka_consumergroup_lag_sum", None)) == 1
                and ("mqd_consumergroup_lag_seconds", "0") in of_now
                and of_now
            )
        )
    assert found["kafka_consumergroup_current_offset", "0"] == 4 and found["kafka_consumergroup_lag", "0"] == 1
    assert found["kafka_consumergroup_current_offset", "1"] == 10 and found["kafka_consumergroup_lag", "1"] == 0
    assert time.time() - 90 < found["mqd_consumergroup_lag_seconds", "0"] + 5 < time.time(), "its time is 5,000 ms"
    assert found["mqd_consumergroup_lag_seconds", "1"] == 0 and found["kafka_consumergroup_members", None] == 1


# -- deleting --------------------------------------------------------------------------------------


def test_a_group_is_deleted_when_it_is_empty(mqd: CommandLine, broker: Broker, topic: str, member) -> None:
    group, idle = fresh("doomed"), fresh("idle")
    poll_until_assigned(member(group, topic, "app-1"))
    commit(broker, idle, topic, {0: 1})
    code, out, error = mqd("group", "delete", group, idle)
    assert (code, out) == (1, f"deleted group {idle}\n") and f"group {group} has members" in error
    assert idle not in mqd("group", "list")[1].splitlines() and group in mqd("group", "list")[1].splitlines()


# -- seeking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--to", "earliest"), [0, 0, 0]),
        (("--to", "latest"), [10, 10, 10]),
        (("--to", "7"), [7, 7, 7]),
        (("--to", "-3"), [7, 7, 7]),
        (("--to", "@3500"), [3, 3, 3]),
        (("--to", "1970-01-01T00:00:05+00:00"), [4, 4, 4]),
        (("--to", "-15m"), [10, 10, 10]),
        (("--shift-by", "2"), [4, 7, 10]),
        (("--shift-by", "-4"), [0, 1, 4]),
    ],
)
def test_seeking(mqd: CommandLine, broker: Broker, topic: str, arguments: tuple[str, str], expected: list[int]) -> None:
    group = fresh("seeker")
    before = {0: 2, 1: 5, 2: 8}
    commit(broker, group, topic, before)
    planned = mqd.json("group", "seek", group, *arguments)
    assert [one["old_offset"] for one in planned["partitions"]] == [2, 5, 8] and [
        one["new_offset"] for one in planned["partitions"]
    ] == expected
    assert not planned["executed"] and offsets_of(mqd, group) == before
    assert mqd.json("group", "seek", group, *arguments, "--execute")["executed"]
    assert offsets_of(mqd, group) == dict(enumerate(expected))


def test_seeking_some_partitions(mqd: CommandLine, broker: Broker, topic: str) -> None:
    group = fresh("seeker")
    commit(broker, group, topic, {0: 2, 1: 5, 2: 8})
    assert mqd("group", "seek", group, f"{topic}:0,2", "--to", "latest", "--execute")[0] == 0
    assert offsets_of(mqd, group) == {0: 10, 1: 5, 2: 10}
    code, _, error = mqd("group", "seek", group, f"{topic}:3", "--to", "latest")
    assert code == 1 and f"topic {topic} has no partition 3; it has 0 to 2" in error
    assert "there is no topic unheard-of" in mqd("group", "seek", group, "unheard-of", "--to", "latest")[2]


def test_offsets_outside_the_log_are_clamped_and_reported(mqd: CommandLine, broker: Broker, topic: str) -> None:
    group = fresh("seeker")
    commit(broker, group, topic, {0: 2, 1: 5})
    code, out, _ = mqd("group", "seek", group, "--shift-by", "-4")
    assert (
        code == 0
        and "clamped from -2: the log begins here" in out
        and out.endswith(f"nothing was changed; --execute would move 2 offsets of group {group}\n")
    )
    found = mqd.json("group", "seek", group, "--to", "9999", "--execute")["partitions"]
    assert [(one["new_offset"], one["note"]) for one in found] == [(10, "clamped from 9999: the log ends here")] * 2


def test_a_new_group_begins_at_the_given_offset(mqd: CommandLine, broker: Broker, topic: str, member) -> None:
    group = fresh("newcomer")
    assert mqd("group", "seek", group, topic, "--to", "8", "--execute")[0] == 0
    consumer = member(group, topic, "app-1")
    first = eventually(lambda: consumer.poll(0.05), "a record")
    assert first.offset() == 8
    code, _, error = mqd("group", "seek", fresh("newcomer"), topic, "--shift-by", "1")
    assert code == 1 and "has no committed offset there" in error


def test_seeking_the_group_of_a_streaming_query_warns(mqd: CommandLine, broker: Broker, topic: str) -> None:
    query, plain = fresh("query"), fresh("plain")
    source = Driver(
        source_options(
            {"kafka.bootstrap.servers": broker.bootstrap, "subscribe": topic, "groupId": query}, streaming=True
        )
    )
    source.commit_offsets(query, {(topic, 0): 2, (topic, 1): 5})
    source.close()
    commit(broker, plain, topic, {0: 2})
    # the group still belongs to the query after its offsets were moved
    for execute in ([], ["--execute"], ["--execute"]):
        code, out, error = mqd("group", "seek", query, "--to", "earliest", *execute)
        assert (
            code == 0
            and f"group {query} has the progress of a Spark streaming query" in error
            and "start the query with a new checkpoint and startingOffsets" in error
        )
    assert offsets_of(mqd, query) == {0: 0, 1: 0}
    assert mqd.json("group", "seek", query, "--to", "latest")["streaming_query"] is True
    assert "streaming query" not in mqd("group", "seek", plain, "--to", "earliest")[2]
    assert mqd.json("group", "seek", plain, "--to", "latest")["streaming_query"] is False


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_offsets_of_a_group_with_members_are_not_moved(
    mqd: CommandLine, broker: Broker, topic: str, member, protocol: str
) -> None:
    group = fresh("busy")
    consumer = member(group, topic, "app-1", **{"group.protocol": protocol})
    poll_until_assigned(consumer)
    consumer.commit(offsets=[TopicPartition(topic, 0, 4)], asynchronous=False)
    code, out, error = mqd("group", "seek", group, "--to", "earliest", "--execute")
    assert (code, out) == (1, "") and "has 1 member (app-1 on 127.0.0.1)" in error and "stop" in error
    code, out, error = mqd("group", "seek", group, "--to", "earliest")
    assert code == 0 and "nothing was changed" in out and "--execute would be refused now" in error
    assert {
        one["partition"]: one["committed_offset"]
        for one in json.loads(mqd("group", "describe", group, "--format", "json")[1])["partitions"]
    }[0] == 4


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--to", "earliest", "--shift-by", "1"),
        ("--to", "yesterday"),
        ("a:b", "--to", "latest"),
        (":1", "--to", "latest"),
    ],
)
def test_wrong_usage(mqd: CommandLine, arguments: tuple[str, ...]) -> None:
    assert mqd("group", "seek", "any", *arguments)[0] == 2
