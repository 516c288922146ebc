"""The attachment's Python half with a broker in this process: requests, drivers, losses, forks, the
metadata cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from mqd.client import requests
from mqd.client.group import coordinator as coordinator_module
from mqd.client.group.coordinator import CoordinatorLookup
from mqd.client.messages import KafkaError, KafkaException, local_error
from mqd.client.shm.attachment import IDLE_WAIT_S, Attachment
from mqd.protocol.messages import FindCoordinatorResponse, InitProducerIdRequest, InitProducerIdResponse
from tests.polling import eventually
from tests.unit.client.client_broker import FakeBroker


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker({"events": 6})


@pytest.fixture
def attachment(broker: FakeBroker) -> Iterator[Attachment]:
    made = Attachment(broker.attach, client_id="test", request_timeout_s=5)
    yield made
    made.close()


class Watcher:
    def __init__(self) -> None:
        self.turns = 0
        self.lost: list[KafkaError] = []
        self.reattached = 0
        self.due: float | None = None

    def on_turn(self, now: float) -> float | None:
        self.turns += 1
        return self.due

    def on_lost(self, error: KafkaError) -> None:
        self.lost.append(error)

    def on_reattached(self, old: object, new: object) -> None:
        self.reattached += 1


def _request_id(attachment: Attachment, timeout: float = -1):
    return attachment.request(requests.INIT_PRODUCER_ID, 4, requests.init_producer_id_request(None, 1000), timeout)


def test_a_request_has_its_response(attachment: Attachment, broker: FakeBroker) -> None:
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: InitProducerIdResponse(producer_id=7, producer_epoch=1)
    assert _request_id(attachment).producer_id == 7
    assert (
        attachment.api.supports_transactions_v2
        and attachment.api.pick_transactional(requests.ADD_PARTITIONS_TO_TXN, True) == 3
    )


def test_requests_of_many_threads(attachment: Attachment, broker: FakeBroker) -> None:
    numbers = iter(range(1000))
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: InitProducerIdResponse(
        producer_id=next(numbers), producer_epoch=0
    )
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(_request_id(attachment).producer_id for _ in range(50)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == list(range(400))


def test_no_response_is_a_timeout(attachment: Attachment, broker: FakeBroker) -> None:
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: None
    with pytest.raises(KafkaException) as raised:
        _request_id(attachment, 0.05)
    assert raised.value.args[0].code() == KafkaError._TIMED_OUT and raised.value.args[0].retriable()


def test_it_waits_for_space(attachment: Attachment, broker: FakeBroker) -> None:
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: InitProducerIdResponse(producer_id=1, producer_epoch=0)
    native = broker.clients[0]
    native.room = False
    threading.Timer(0.05, lambda: setattr(native, "room", True)).start()
    assert _request_id(attachment).producer_id == 1


def test_the_background_thread_drives(attachment: Attachment) -> None:
    watcher = Watcher()
    watcher.due = 0.0
    attachment.subscribe(watcher)
    deadline = time.monotonic() + 5
    while watcher.turns < 10 and time.monotonic() < deadline:
        time.sleep(0.001)  # another thread works
    assert watcher.turns >= 10


def test_the_background_thread_takes_over_again(attachment: Attachment, broker: FakeBroker) -> None:
    """A thread that waited and left must not leave it parked: another thread's wait has ended
    without driving.
    """
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: InitProducerIdResponse(producer_id=1, producer_epoch=0)
    threads = [threading.Thread(target=lambda: [_request_id(attachment) for _ in range(100)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for _ in range(20):
        answered = threading.Event()
        attachment.send(
            requests.INIT_PRODUCER_ID,
            4,
            requests.init_producer_id_request(None, 1000),
            lambda response, error: answered.set(),
        )
        assert answered.wait(5), "no thread drives"
        attachment.wait_for(lambda: True)
        attachment.wait_for(lambda: False, 0.002)


def test_a_waiting_thread_takes_over_from_one_that_ctrl_c_interrupts(
    attachment: Attachment, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept for up to IDLE_WAIT_S, and no thread drove."""
    native, done = broker.clients[0], []
    other = threading.Thread(target=lambda: attachment.wait_for(lambda: done))
    wait = native.wait

    def interrupted(timeout_us: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            return wait(timeout_us)
        other.start()
        eventually(lambda: attachment._waiting_count == 2)
        with attachment.lock:  # the other thread has released it: it waits
            raise KeyboardInterrupt

    monkeypatch.setattr(native, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attachment.wait_for(lambda: False)
    try:
        eventually(lambda: attachment._driver == other.ident, seconds=IDLE_WAIT_S / 2)
    finally:
        with attachment.lock:
            done.append(True)
            attachment.changed.notify_all()
        attachment.wake()
        other.join()


def test_a_turn_requested_during_a_turn_is_not_slept_through(
    attachment: Attachment, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """produce() arms a stage without the lock, and requests a turn: the current turn has passed
    that stage, and the driver has not computed its sleep yet.
    """
    native, history, served = broker.clients[0], [], threading.Event()
    sleep = native.wait

    def wait(timeout_us: int) -> int:
        history.append("wait")
        return sleep(timeout_us)

    class Late(Watcher):
        def on_turn(self, now: float) -> float | None:
            if "asked" in history:
                served.set()
            elif history[-2:] == ["wait", "turn"]:  # after this turn the driver sleeps
                history.append("asked")
                thread = threading.Thread(target=attachment.wake_by, args=(now,))
                thread.start()
                thread.join()
            history.append("turn")
            return None

    monkeypatch.setattr(native, "wait", wait)
    late = Late()
    attachment.subscribe(late)
    deadline = time.monotonic() + 5
    while "asked" not in history and time.monotonic() < deadline:
        attachment.wake()
        time.sleep(0.02)  # another thread works
    assert served.wait(5), "the driver sleeps"


def test_a_dead_worker_is_attached_again(attachment: Attachment, broker: FakeBroker) -> None:
    watcher = Watcher()
    attachment.subscribe(watcher)
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: None
    outcome: list = []
    attachment.send(
        requests.INIT_PRODUCER_ID,
        4,
        requests.init_producer_id_request(None, 1000),
        lambda response, error: outcome.append(error),
    )
    broker.refuse = ConnectionRefusedError("no broker listens")
    broker.kill()
    assert attachment.wait_for(lambda: len(watcher.lost) >= 3, 5)  # it retries again and again
    assert outcome[0].code() == KafkaError._TRANSPORT and outcome[0].retriable()
    broker.refuse = None
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: InitProducerIdResponse(producer_id=3, producer_epoch=0)
    assert _request_id(attachment).producer_id == 3
    assert watcher.reattached == 1 and attachment.generation == 2
    assert broker.clients[0].closed and not broker.clients[1].closed


def test_an_unavailable_coordinator_causes_no_busy_loop(attachment: Attachment, broker: FakeBroker) -> None:
    """Without a broker nothing can be sent: a due time in the past would cause turns in a busy loop
    until a broker is available.
    """
    broker.answers[requests.FIND_COORDINATOR] = lambda _request: None
    coordinator = CoordinatorLookup(attachment, "group")
    watcher = Watcher()
    attachment.subscribe(watcher)
    broker.refuse = ConnectionRefusedError("no broker listens")
    broker.kill()
    assert attachment.wait_for(lambda: watcher.lost, 5)
    with attachment.lock:
        assert not attachment.attached
        assert coordinator.on_turn(time.monotonic() + 1) is None
    found = FindCoordinatorResponse.Coordinator(key="group", node_id=1, host="127.0.0.1", port=9092)
    broker.answers[requests.FIND_COORDINATOR] = lambda _request: FindCoordinatorResponse(coordinators=[found])
    known: list[bool] = []
    coordinator.when_known(lambda: known.append(True))
    broker.seen.clear()
    broker.refuse = None
    assert attachment.wait_for(lambda: known, 5)
    # known by the response, not because it waited long enough
    assert requests.FIND_COORDINATOR in [key for key, _ in broker.seen]


@pytest.mark.parametrize("is_gone", [False, True])
def test_requests_wait_no_longer_than_they_should_for_a_coordinator(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """They were held until the lookup without a response timed out."""
    monkeypatch.setattr(coordinator_module, "WAIT_MAX_S", 0.2)
    broker.answers[requests.FIND_COORDINATOR] = lambda _request: None
    attachment = Attachment(broker.attach, client_id="test", request_timeout_s=600)
    try:
        watcher, sent = Watcher(), threading.Event()
        attachment.subscribe(watcher)
        coordinator = CoordinatorLookup(attachment, "group")
        if is_gone:
            broker.refuse = ConnectionRefusedError("no broker listens")
            broker.kill()
            assert attachment.wait_for(lambda: watcher.lost, 5)
        if not is_gone:  # otherwise the thread might look again anyway
            eventually(lambda: attachment._sleep_until >= time.monotonic() + 60, "the thread does not sleep for long")
        with attachment.lock:
            coordinator.when_known(sent.set)
            assert coordinator.on_turn(0.0) == coordinator._give_up_at
        assert sent.wait(10)
    finally:
        attachment.close()


def test_a_client_in_wake_is_not_closed(
    attachment: Attachment, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reattaches while another thread is in the old attachment's wake(): that call ends
    first.
    """
    old, inside, go_on, closed_inside = broker.clients[0], threading.Event(), threading.Event(), []
    wake, close, waking = old.wake, old.close, attachment._wake_lock

    class Waking:
        """The second call waits: it is the driver's."""

        def __enter__(self) -> None:
            if not waking.acquire(blocking=False):
                go_on.set()
                waking.acquire()

        def __exit__(self, *_exception: object) -> None:
            waking.release()

    def wake_slowly() -> None:
        if threading.current_thread() is waker:
            inside.set()
            assert go_on.wait(10)
            closed_inside.append(old.closed)
        wake()

    def close_now() -> None:
        close()
        go_on.set()

    monkeypatch.setattr(attachment, "_wake_lock", Waking())
    monkeypatch.setattr(old, "wake", wake_slowly)
    monkeypatch.setattr(old, "close", close_now)
    waker = threading.Thread(target=attachment.wake)
    waker.start()
    assert inside.wait(10)
    old.dead = True
    wake()
    waker.join(20)
    assert closed_inside == [False]
    assert attachment.wait_for(lambda: attachment.generation == 2, 5) and old.closed


def test_a_final_refusal_ends_it(attachment: Attachment, broker: FakeBroker) -> None:
    broker.refuse = KafkaException(local_error(KafkaError._FATAL, "another layout: restart this process", fatal=True))  # type: ignore[assignment]
    broker.kill()
    with pytest.raises(KafkaException, match="restart this process"):
        attachment.wait_for(lambda: False, 5)


def _finally_refused(attachment: Attachment, broker: FakeBroker) -> None:
    """By the background thread, which ends then."""
    broker.refuse = KafkaException(local_error(KafkaError._FATAL, "another layout: restart this process", fatal=True))  # type: ignore[assignment]
    broker.kill()
    attachment._thread.join(10)
    assert not attachment._thread.is_alive()


def test_no_caller_has_a_turn_after_a_final_refusal(attachment: Attachment, broker: FakeBroker) -> None:
    """A caller with a request in each turn, like a group member, would be refused there: an
    internal error, and another error for it than the cause.
    """

    class Asking(Watcher):
        def on_turn(self, now: float) -> float | None:
            if not attachment.attached:
                attachment.send(requests.INIT_PRODUCER_ID, 0, InitProducerIdRequest(), lambda response, error: None)
            return super().on_turn(now)

    pending = Asking()
    attachment.subscribe(pending)
    _finally_refused(attachment, broker)
    assert attachment.fatal is not None and attachment.fatal.str() == "another layout: restart this process"
    assert [error.str() for error in pending.lost if error.fatal()] == [attachment.fatal.str()]


def test_a_listener_that_fails_at_a_final_refusal_does_not_block_others(
    attachment: Attachment, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Watcher):
        def on_lost(self, error: KafkaError) -> None:
            if error.fatal():
                raise ValueError("a fault")

    faulty, watcher = Faulty(), Watcher()
    attachment.subscribe(faulty)
    attachment.subscribe(watcher)
    _finally_refused(attachment, broker)
    assert attachment.fatal is not None and [error.str() for error in watcher.lost if error.fatal()] == [
        attachment.fatal.str()
    ] == ["another layout: restart this process"]
    assert "a fault" in caplog.text


def test_a_final_refusal_reaches_all_listeners_when_one_raises(
    attachment: Attachment, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Both the requesters and the listeners."""
    reported: list[KafkaError] = []

    def fails(_response: object, error: KafkaError | None) -> None:
        raise ValueError(f"a fault: {error}")

    class Asking(Watcher):
        def on_lost(self, error: KafkaError) -> None:
            super().on_lost(error)
            if not error.fatal():  # waits for the next attachment, which never comes
                attachment.send(requests.INIT_PRODUCER_ID, 0, InitProducerIdRequest(), fails)
                attachment.send(
                    requests.INIT_PRODUCER_ID,
                    0,
                    InitProducerIdRequest(),
                    lambda response, error: reported.append(error),
                )

    pending = Asking()
    attachment.subscribe(pending)
    _finally_refused(attachment, broker)
    assert [error.fatal() for error in reported] == [True] and [error.fatal() for error in pending.lost] == [
        False,
        True,
    ]
    assert "a fault" in caplog.text


def test_topics_are_not_requested_after_a_final_refusal(attachment: Attachment, broker: FakeBroker) -> None:
    class Wanting(Watcher):
        def on_lost(self, error: KafkaError) -> None:
            super().on_lost(error)
            attachment.metadata.refresh([f"wanted after loss {len(self.lost)}"])

    wanting = Wanting()
    attachment.subscribe(wanting)
    broker.answers[requests.METADATA] = lambda request: None
    with attachment.lock:
        attachment.metadata.refresh(["under way"])
        attachment.metadata.refresh(["wanted"])
    _finally_refused(attachment, broker)
    assert attachment.fatal is not None and attachment.fatal.str() == "another layout: restart this process"
    assert [error.fatal() for error in wanting.lost] == [False, True]


def test_an_unsuitable_attachment_is_closed(attachment: Attachment, broker: FakeBroker) -> None:
    class Choosy(Watcher):
        def on_reattached(self, old: object, new: object) -> None:
            super().on_reattached(old, new)
            if self.reattached < 3:
                raise OSError("less memory than is needed")

    choosy = Choosy()
    attachment.subscribe(choosy)
    broker.kill()
    assert attachment.wait_for(lambda: choosy.reattached == 3, 5)
    assert [client.closed for client in broker.clients] == [True, True, True, False]


def test_ctrl_c_while_listeners_move_makes_it_attach_again(attachment: Attachment, broker: FakeBroker) -> None:
    """A listener that was not told would use the dead client forever. Neither client is closed: the
    batches of a producer are in one of them.
    """
    closed: list[bool] = []

    class Interrupted(Watcher):
        def on_reattached(self, old: object, new: object) -> None:
            super().on_reattached(old, new)
            if self.reattached == 1:
                raise KeyboardInterrupt
            closed.extend(client.closed for client in broker.clients)

    interrupted = Interrupted()
    attachment.subscribe(interrupted)
    broker.refuse = ConnectionRefusedError("no broker listens")
    broker.kill()

    def accept_this_thread() -> None:
        if attachment._driver == threading.get_ident():
            broker.refuse = None

    with pytest.raises(KeyboardInterrupt):
        attachment.wait_for(accept_this_thread, 5)
    assert attachment.wait_for(lambda: interrupted.reattached == 2, 5)
    assert closed == [False] * 3 and attachment.attached and attachment.native is broker.clients[2]


def test_a_bug_is_reported(attachment: Attachment) -> None:
    class Faulty(Watcher):
        def on_turn(self, now: float) -> float | None:
            raise ValueError("a fault")

    faulty = Faulty()
    attachment.subscribe(faulty)
    with pytest.raises(KafkaException, match="a fault in the client"):
        while True:
            attachment.wait_for(lambda: False, 0.01)
    assert attachment.fatal is not None and faulty.lost


def test_a_listener_that_fails_at_a_loss_does_not_block_others(attachment: Attachment, broker: FakeBroker) -> None:
    """Whichever thread drives."""

    class Faulty(Watcher):
        def on_lost(self, error: KafkaError) -> None:
            raise ValueError("a fault")

    faulty, watcher = Faulty(), Watcher()
    attachment.subscribe(faulty)
    attachment.subscribe(watcher)
    with attachment.lock:
        broker.kill()
    with pytest.raises(KafkaException, match="a fault in the client"):
        while True:
            attachment.wait_for(lambda: False, 0.01)
    assert watcher.lost[-1].fatal()


def test_close_ends_waiting_calls(broker: FakeBroker) -> None:
    attachment = Attachment(broker.attach)
    broker.answers[requests.INIT_PRODUCER_ID] = lambda _request: None
    errors: list[KafkaError] = []

    def request() -> None:
        try:
            _request_id(attachment)
        except KafkaException as error:
            errors.append(error.args[0])

    thread = threading.Thread(target=request)
    thread.start()
    while not any(key == requests.INIT_PRODUCER_ID for key, _ in broker.seen):
        time.sleep(0.001)  # the other thread's request
    attachment.close()
    thread.join(5)
    assert not thread.is_alive() and errors[0].code() == KafkaError._DESTROY
    attachment.close()
    with pytest.raises(KafkaException):
        _request_id(attachment)


def test_a_child_of_fork_gets_an_error(attachment: Attachment) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _request_id(attachment)
        except KafkaException as error:
            status = 0 if error.args[0].code() == KafkaError._STATE and "fork" in error.args[0].str() else 2
        finally:
            attachment.close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert attachment.metadata.find("events", 5).partition_count == 6  # the parent's continues


def test_metadata_is_found_and_remembered(attachment: Attachment, broker: FakeBroker) -> None:
    found = attachment.metadata.find("events", 5)
    assert found.partition_count == 6 and attachment.metadata.names[found.topic_id] == "events"
    requested = len(broker.seen)
    attachment.metadata.find("events", 5)
    assert len(broker.seen) == requested
    with pytest.raises(KafkaException) as raised:
        attachment.metadata.find("nowhere", 0.05)
    assert raised.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_topic_that_appears_is_found(attachment: Attachment, broker: FakeBroker) -> None:
    threading.Timer(0.1, lambda: broker.topics.update(later=3)).start()
    assert attachment.metadata.find("later", 5).partition_count == 3
