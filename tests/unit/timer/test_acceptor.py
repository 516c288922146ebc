"""Schedules in the acceptor: refused records, required rights, and when the timer is started."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd import native
from mqd.acceptor import schedules
from mqd.acceptor.checks import CheckResult, check_records
from mqd.acceptor.metadata import Metadata
from mqd.acceptor.schedules import TimerStarter, start_by_supervisord
from mqd.base import blocking_queries, schedule_files
from mqd.cluster.host import messages
from mqd.log.schedule_headers import DELAY_MS_MAX
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.records import Record, encode_batch
from mqd.security.acl import Operation, ResourceType
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_rights import ALICE, broker_of, grant, make_topic, run

__all__ = ["broker_of"]

TOPIC = ResourceType.TOPIC


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_records_that_cannot_be_scheduled(compression: str) -> None:
    now_ms = int(time.time() * 1000)

    def check(*delays: bytes) -> CheckResult:
        records = [Record(b"v", None, now_ms, [("mqd-delay-ms", delay)]) for delay in delays]
        return check_records(encode_batch(records, compression=compression), native.CHECK_SCHEDULES)

    assert check(b"0", b"1000", b"31622000000") == CheckResult(0)
    error, payload = check(b"1", b"soon", b"99999999999999", b"2")
    assert error == E.INVALID_RECORD
    count, index_count, message_bytes = struct.unpack_from("=IHH", payload)
    assert (count, index_count) == (2, 2) and struct.unpack_from("=2i", payload, 8) == (1, 2)
    message = payload[16:].decode()
    assert len(message) == message_bytes and "record 1 of the batch cannot be scheduled: mqd-delay-ms is not" in message
    error, payload = check(*[b"x"] * 100)
    assert struct.unpack_from("=IH", payload) == (100, 64)


def test_records_whose_timestamp_is_more_than_a_year_ahead() -> None:
    now_ms = int(time.time() * 1000)
    for headers in ([], [("mqd-delay-ms", b"0")]):
        records = [Record(b"v", None, stamp, headers) for stamp in (now_ms, now_ms + 2 * DELAY_MS_MAX)]
        assert check_records(encode_batch(records[:1]), native.CHECK_SCHEDULES) == CheckResult(0)
        error, payload = check_records(encode_batch(records), native.CHECK_SCHEDULES)
        assert error == E.INVALID_RECORD and struct.unpack_from("=i", payload, 8) == (1,)


# -- rights ----------------------------------------------------------------------------------------


@run
async def test_a_schedule_requires_the_right_to_write_to_its_target(broker_of: Callable[[], HandlerBroker]) -> None:
    def create() -> m.CreateTopicsRequest:
        config = m.CreateTopicsRequest.Config(name="schedule.to", value="orders")
        topic = m.CreateTopicsRequest.Topic(name="later", num_partitions=1, replication_factor=1, configs=[config])
        return m.CreateTopicsRequest(topics=[topic], timeout_ms=5000)

    def alter(cls: type[m.AlterConfigsRequest] | type[m.IncrementalAlterConfigsRequest]) -> object:
        config = cls.Config(name="schedule.to", value="orders")  # type: ignore[attr-defined]
        return cls(resources=[cls.Resource(resource_type=2, resource_name="later", configs=[config])])  # type: ignore

    async with broker_of() as broker:
        await make_topic(broker, "orders")
        own = (Operation.CREATE, TOPIC, "later"), (Operation.ALTER_CONFIGS, TOPIC, "later")
        await grant(broker, *own)
        denied = (await broker.send_request(create(), 7, ALICE)).topics[0]
        assert denied.error_code == E.TOPIC_AUTHORIZATION_FAILED and "later" not in broker.metadata.topics
        await grant(broker, *own, (Operation.WRITE, TOPIC, "orders"))
        assert (await broker.send_request(create(), 7, ALICE)).topics[0].error_code == 0
        for cls, version in ((m.AlterConfigsRequest, 2), (m.IncrementalAlterConfigsRequest, 1)):
            await grant(broker, *own)
            response = await broker.send_request(alter(cls), version, ALICE)
            assert response.responses[0].error_code == E.TOPIC_AUTHORIZATION_FAILED
            await grant(broker, *own, (Operation.WRITE, TOPIC, "orders"))
            assert (await broker.send_request(alter(cls), version, ALICE)).responses[0].error_code == 0


# -- the timer -------------------------------------------------------------------------------------


def _topic(name: str, leader: int, **config: str) -> messages.TopicImage:
    partition = messages.PartitionImage(0, 0, 0, 0, leader, 7, [1, 2], [1, 2])
    return messages.TopicImage(
        name, name.encode().ljust(16), [partition], {k.replace("_", "."): v for k, v in config.items()}
    )


def test_the_timer_is_started_when_there_is_a_schedule(tmp_path: Path) -> None:
    started: list[None] = []
    metadata = Metadata()

    async def play() -> None:
        loop = asyncio.get_running_loop()
        starter = TimerStarter(
            {"logging.level": "debug", "listeners": "x"}, metadata, 1, tmp_path, lambda: started.append(None)
        )

        async def put(topic: messages.TopicImage) -> None:
            message = messages.TopicPut(metadata.version + 1, topic)
            metadata.apply(message)
            starter.on_metadata(message)
            for _ in range(100):
                await asyncio.sleep(0.001)

        await put(_topic("orders", 1))
        starter.start(loop)
        assert not started and not list(tmp_path.iterdir())
        await put(_topic("elsewhere", 2, schedule_to="orders"))
        assert not started
        await put(_topic("later", 1, schedule_to="orders", schedule_delay_ms="5"))
        assert len(started) == 1
        found = schedule_files.read_schedules(tmp_path)
        assert found.config == {"logging.level": "debug"}
        assert [(one.topic, one.target, one.delay_ms, one.led) for one in found.topics] == [
            ("elsewhere", "orders", 0, {}),
            ("later", "orders", 5, {0: 7}),
        ]
        before = (tmp_path / schedule_files.SCHEDULES).stat().st_ino
        await put(_topic("orders", 1))
        assert (tmp_path / schedule_files.SCHEDULES).stat().st_ino == before, "only what changed is written"
        await put(_topic("later", 2, schedule_to="orders"))
        assert not any(one.led for one in schedule_files.read_schedules(tmp_path).topics)
        starter.stop()

    asyncio.run(play())


def test_one_start_of_the_timer_is_under_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While supervisord does not respond, changes of partitions begin no further thread."""
    begun: list[asyncio.Future[None]] = []

    def in_thread(query: Callable[[], None]) -> asyncio.Future[None]:
        begun.append(asyncio.get_running_loop().create_future())
        return begun[-1]

    async def play() -> None:
        metadata = Metadata()
        starter = TimerStarter({}, metadata, 1, tmp_path, lambda: None)
        starter.start(asyncio.get_running_loop())
        for number in range(5):
            message = messages.TopicPut(number, _topic("later", 1, schedule_to="orders"))
            metadata.apply(message)
            starter.on_metadata(message)
        assert len(begun) == 1
        begun[0].set_exception(OSError("it has stopped"))
        await asyncio.sleep(0)
        starter.on_metadata(message)
        assert len(begun) == 2
        starter.stop()

    monkeypatch.setattr(schedules, "in_thread", in_thread)
    asyncio.run(play())


def _start_with_a_failure(metadata: Metadata, run_dir: Path, failures: list) -> None:
    """Returns when the timer has been started after the first attempt took the only failure."""

    async def play() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        starter = TimerStarter({}, metadata, 1, run_dir, lambda: loop.call_soon_threadsafe(started.set))
        starter.start(loop)
        assert not failures and not started.is_set()
        await asyncio.wait_for(started.wait(), 20)
        starter.stop()

    asyncio.run(play())


def test_a_start_without_a_thread_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error ended the acceptor's connection to the controller."""
    metadata = Metadata()
    metadata.apply(messages.TopicPut(0, _topic("later", 1, schedule_to="orders")))
    refusals = [RuntimeError("can't start new thread")]

    def in_thread(query: Callable[[], None]) -> asyncio.Future[None]:
        if refusals:
            raise refusals.pop()
        return blocking_queries.in_thread(query)

    monkeypatch.setattr(schedules, "in_thread", in_thread)
    monkeypatch.setattr(schedules, "START_RETRY_S", 0.01)

    _start_with_a_failure(metadata, tmp_path, refusals)
    assert "the timer cannot be started" in caplog.text


def test_schedules_that_cannot_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = Metadata()
    metadata.apply(messages.TopicPut(0, _topic("later", 1, schedule_to="orders")))
    failures, write = [OSError(28, "No space left on device")], schedule_files.write

    def fail_once(*what: object) -> None:
        if failures:
            raise failures.pop()
        write(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule_files, "write", fail_once)
    monkeypatch.setattr(schedules, "START_RETRY_S", 0.01)

    _start_with_a_failure(metadata, tmp_path, failures)
    assert "cannot be written for the timer" in caplog.text
    assert [one.topic for one in schedule_files.read_schedules(tmp_path).topics] == ["later"]


def test_a_supervisord_without_an_address() -> None:
    with pytest.raises(OSError, match="unix_http_server"):
        start_by_supervisord({"SUPERVISOR_PROCESS_NAME": "mqd-acceptor"})
