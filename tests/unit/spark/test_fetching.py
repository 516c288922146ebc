"""Fetch responses as read by the executors, compared with the codec: every version, and every kind
of invalid response.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the executors' readers come with pyarrow: pip install 'mqd[spark]'")

from mqd.protocol.api import encode_response  # noqa: E402
from mqd.protocol.headers import RequestHeader  # noqa: E402
from mqd.protocol.messages import FetchResponse  # noqa: E402
from mqd.spark import fetching, reading  # noqa: E402
from mqd.spark.fetching import VERSION_MAX, VERSION_MIN, PartitionResponse, parse_response  # noqa: E402
from mqd.spark.options import source_options  # noqa: E402
from mqd.spark.planning import Range  # noqa: E402
from mqd.spark.wire import BrokerError, MqdReadError, parse_servers  # noqa: E402

TOPIC = bytes(range(16))


def _response(rng: random.Random, records: bytes | None) -> FetchResponse:
    aborted = rng.choice(
        (
            None,
            [],
            [
                FetchResponse.AbortedTransaction(producer_id=rng.randrange(2**62), first_offset=rng.randrange(2**40))
                for _ in range(rng.randrange(300))
            ],
        )
    )
    part = FetchResponse.PartitionData(
        partition_index=7,
        error_code=rng.choice((0, 1, 6, 100)),
        high_watermark=rng.randrange(2**50),
        last_stable_offset=rng.randrange(2**50),
        log_start_offset=rng.randrange(2**50),
        aborted_transactions=aborted,
        preferred_read_replica=rng.choice((-1, 3)),
        records=records,
    )
    if rng.random() < 0.3:
        part.current_leader = FetchResponse.LeaderIdAndEpoch(leader_id=4, leader_epoch=9)
    return FetchResponse(
        throttle_time_ms=1,
        error_code=0,
        session_id=0,
        responses=[FetchResponse.TopicResponse(topic_id=TOPIC, partitions=[part])],
    )


def _frame(response: FetchResponse, version: int) -> bytes:
    return encode_response(RequestHeader(1, version, 55), response)


@pytest.mark.parametrize("version", range(VERSION_MIN, VERSION_MAX + 1))
def test_the_result_equals_the_codecs(version: int) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        records = rng.choice((None, b"", rng.randbytes(rng.choice((1, 127, 128, 70_000)))))
        response = _response(rng, records)
        part = response.responses[0].partitions[0]
        answer = parse_response(memoryview(_frame(response, version)), 55, TOPIC, 7)
        assert bytes(answer.records) == (records or b"")
        aborted = [(one.producer_id, one.first_offset) for one in part.aborted_transactions or []]
        assert answer == PartitionResponse(
            part.error_code,
            part.high_watermark,
            part.last_stable_offset,
            part.log_start_offset,
            aborted,
            part.preferred_read_replica,
            answer.records,
        )


def test_an_error_of_the_whole_request() -> None:
    with pytest.raises(BrokerError) as error:
        parse_response(memoryview(_frame(FetchResponse(error_code=71, session_id=0, responses=[]), 13)), 55, TOPIC, 7)
    assert error.value.code == 71


def test_responses_to_another_request() -> None:
    frame = memoryview(_frame(_response(random.Random(1), b"abc"), 16))
    for number, topic, partition in ((54, TOPIC, 7), (55, bytes(16), 7), (55, TOPIC, 6)):
        with pytest.raises(ValueError):
            parse_response(frame, number, topic, partition)


def test_any_bytes_give_a_response_or_an_error() -> None:
    """Truncated anywhere, and with any byte changed: never more records than bytes, and never
    another exception.
    """
    frame = _frame(_response(random.Random(3), b"x" * 50), 16)
    for end in range(len(frame)):
        try:
            parse_response(memoryview(frame[:end]), 55, TOPIC, 7)
        except ValueError:
            continue
        assert end >= len(frame) - 3  # bytes after the records are ignored
    for seed in range(3000):
        rng = random.Random(seed)
        damaged = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(min(len(damaged), 90))] = rng.randrange(256)
        try:
            response = parse_response(memoryview(damaged), 55, TOPIC, 7)
        except (ValueError, BrokerError):
            continue
        assert len(response.records) <= len(frame)


def test_servers() -> None:
    assert parse_servers("a:1, b ,[::1]:3") == [("a", 1), ("b", 9092), ("::1", 3)]
    for text in ("", " , ", "a:x"):
        with pytest.raises(MqdReadError):
            parse_servers(text)


def test_time_spent_on_local_records_does_not_count_as_silence_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local part took longer than poll_timeout_s; the leader is then unavailable for a moment."""
    now, requested = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(fetching, "time", clock)

    class Near:
        position = 60

        def views(self) -> Any:
            clock.sleep(600)
            return iter(())

        def close(self) -> None:
            """Nothing is open."""

    def metadata(_: Any) -> None:
        requested.append(now[0])
        raise ConnectionError("the broker is starting")

    monkeypatch.setattr(reading, "_open_local", lambda *_: Near())
    options = source_options(
        {"kafka.bootstrap.servers": "a:1", "subscribe": "t", "kafkaConsumer.pollTimeoutMs": "5000"}, streaming=True
    )
    with pytest.raises(MqdReadError, match="no records from offset 60 on .* within 5 s: the broker is starting"):
        list(reading._views(options, SimpleNamespace(metadata=metadata), Range("t", 0, 0, 100, TOPIC)))  # type: ignore[arg-type]
    assert requested[0] == 700 and 5 <= requested[-1] - 700 <= 7 and len(requested) > 3
