"""`mqd txn` against a real broker: open and hanging transactions, and aborting them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker import Broker
from tests.interaction.command_line import CommandLine
from tests.interaction.transactional import begun, connect, fetch_committed, fresh, hang, read_committed, topic_of
from tests.kafka_connection import KafkaConnection

PRODUCER_FENCED, INVALID_PRODUCER_EPOCH = 90, 47


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Without partition verification, so that a transaction can be left hanging, as on older
    brokers.
    """
    with Broker(
        tmp_path_factory.mktemp("cli-txn") / "data", config={"transaction.partition.verification.enable": "false"}
    ) as running:
        yield running


@pytest.fixture
def kafka(broker: Broker) -> Iterator[KafkaConnection]:
    with connect(broker) as connection:
        yield connection


@pytest.fixture
def mqd(broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(broker, monkeypatch, capfdbinary)


def hanging(mqd: CommandLine, topic: str, idle: str = "0ms") -> list[tuple[int, int, int]]:
    found = mqd.json("txn", "list", "--hanging", "--idle", idle)
    return [(one["partition"], one["start_offset"], one["producer_id"]) for one in found if one["topic"] == topic]


def test_an_open_transaction_is_listed_and_described(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic = topic_of(kafka, 3)
    producer = begun(kafka, topic, 0, 2)
    (one,) = [one for one in mqd.json("txn", "list", "--state", "Ongoing") if one["transactional_id"] == producer.name]
    assert (one["state"], one["producer_id"], one["producer_epoch"]) == (
        "Ongoing",
        producer.producer_id,
        producer.epoch,
    )
    assert 0 <= one["open_ms"] < 60_000 and one["partitions"] == {topic: [0, 2]}
    assert mqd.json("txn", "list", "--longer-than", "1h") == []
    found = mqd.json("txn", "describe", producer.name)
    assert [(place["topic"], place["partition"], place["start_offset"]) for place in found["open_in"]] == [
        (topic, 0, 0),
        (topic, 2, 0),
    ]
    code, out, _ = mqd("txn", "describe", producer.name)
    assert (
        code == 0
        and out.startswith(f"transactional id {producer.name}: Ongoing, open for ")
        and "of at most 1 min" in out
    )
    assert producer.end(True) == 0
    (one,) = [one for one in mqd.json("txn", "list") if one["transactional_id"] == producer.name]
    assert (one["state"], one["open_ms"]) == ("CompleteCommit", None)
    code, out, _ = mqd("txn", "list")
    assert code == 0 and any(line.startswith(producer.name) and "CompleteCommit" in line for line in out.splitlines())


def test_abort_by_transactional_id(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic = topic_of(kafka, 2)
    producer = begun(kafka, topic, 0, 1)
    code, out, _ = mqd("txn", "abort", producer.name)
    assert code == 0 and out.endswith(
        f"nothing was changed; --execute would abort it in {topic}:0-1 and fence its producer\n"
    )
    assert producer.state().transaction_state == "Ongoing"
    code, out, error = mqd("txn", "abort", producer.name, "--execute")
    assert code == 0 and out.startswith(f"aborted the transaction of {producer.name} in {topic}:0-1"), error
    assert producer.end(True) in (PRODUCER_FENCED, INVALID_PRODUCER_EPOCH)
    assert [read_committed(kafka, topic, index) for index in (0, 1)] == [[], []]
    assert producer.state().transaction_timeout_ms == 60_000
    code, _, error = mqd("txn", "abort", producer.name, "--execute")
    assert code == 1 and f"transactional id {producer.name} has no transaction open" in error


def test_a_hanging_transaction_is_found_and_aborted(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic = topic_of(kafka, 2)
    healthy = begun(kafka, topic, 0)
    hang(kafka, topic, 1, 4_000_000_001)
    hang(kafka, topic, 1, 4_000_000_002)
    assert fetch_committed(kafka, topic, 1).last_stable_offset == 0
    assert hanging(mqd, topic) == [(1, 0, 4_000_000_001), (1, 1, 4_000_000_002)], "and not what a coordinator knows"
    assert hanging(mqd, topic, "15m") == []
    code, out, _ = mqd("txn", "list", "--hanging", "--idle", "0ms")
    assert code == 0 and "read_committed consumers are blocked at these offsets" in out
    code, out, _ = mqd("txn", "abort", topic, "1", "0")
    assert (
        code == 0 and "nothing was changed" in out and "no coordinator will end it" in out and "last commit" not in out
    )
    assert mqd("txn", "abort", topic, "1", "0", "--execute") == (
        0,
        f"aborted the transaction of producer id 4000000001 that begins at {topic}-1 offset 0\n",
        "",
    )
    assert mqd("txn", "abort", topic, "1", "--producer-id", "4000000002", "--execute")[0] == 0
    assert hanging(mqd, topic) == []
    outcome = fetch_committed(kafka, topic, 1)
    assert outcome.last_stable_offset == outcome.high_watermark == 4 and read_committed(kafka, topic, 1) == []
    assert healthy.end(True) == 0 and read_committed(kafka, topic, 0) == [b"open"]


def test_aborting_a_possibly_committed_transaction_warns(mqd: CommandLine, kafka: KafkaConnection) -> None:
    """As after a power cut that lost a marker: open in a partition, completed for its coordinator."""
    topic = topic_of(kafka, 2)
    producer = begun(kafka, topic, 0)
    producer_id = producer.producer_id
    assert producer.end(True) == 0
    hang(kafka, topic, 1, producer_id)
    assert hanging(mqd, topic) == [(1, 0, producer_id)]
    code, out, _ = mqd("txn", "abort", topic, "1", "0")
    assert code == 0 and "nothing was changed" in out and f"{producer.name} may already have committed it" in out
    assert mqd.json("txn", "abort", topic, "1", "0", "--execute")["maybe_committed"] is True
    assert hanging(mqd, topic) == [] and read_committed(kafka, topic, 0) == [b"open"]


def test_a_transaction_open_at_its_coordinator_is_aborted_everywhere(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic = topic_of(kafka, 2)
    producer = begun(kafka, topic, 0, 1)
    code, out, _ = mqd("txn", "abort", topic, "1", "0")
    assert code == 0 and f"it belongs to {producer.name}" in out
    assert mqd("txn", "abort", topic, "1", "0", "--execute")[0] == 0
    assert producer.end(True) in (PRODUCER_FENCED, INVALID_PRODUCER_EPOCH)
    assert [read_committed(kafka, topic, index) for index in (0, 1)] == [[], []]


def test_missing_transactions_are_reported(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic = topic_of(kafka)
    for verb in ("describe", "abort"):
        code, out, error = mqd("txn", verb, "nobody")
        assert (code, out) == (1, "") and "there is no transactional id nobody" in error
    assert (
        f"no open transaction of {topic}-0 begins at 5; none is open there" in mqd("txn", "abort", topic, "0", "5")[2]
    )
    assert "there is no partition 9" in mqd("txn", "abort", topic, "9", "5")[2]
    assert mqd("txn", "list", "-b", "127.0.0.1:1")[0] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("abort",),
        ("abort", "t", "0"),
        ("abort", "t", "0", "0", "--producer-id", "1"),
        ("abort", "t", "x", "0"),
        ("abort", "id", "--producer-id", "1"),
        ("list", "--longer-than", "long"),
        ("list", "--hanging", "--state", "Ongoing"),
    ],
)
def test_wrong_usage(mqd: CommandLine, arguments: tuple[str, ...]) -> None:
    assert mqd("txn", *arguments)[0] == 2


def test_names_are_completed(broker: Broker, kafka: KafkaConnection) -> None:
    from mqd.cli import transactions as txns

    producer = begun(kafka, topic_of(kafka), 0)
    assert producer.name in txns.transactional_ids(broker.bootstrap) and fresh("none") not in txns.transactional_ids(
        broker.bootstrap
    )
    assert producer.end(False) == 0
