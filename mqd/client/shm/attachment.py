"""An attachment to this host's broker: requests, wake-ups, and attaching again after the worker has
died. Clients do not share attachments: a producer has one, a consumer two.

    attachment = Attachment(opener, client_id="app")    # opener() returns a NativeClient, see below
    attachment.subscribe(listener)                      # see Listener; held weakly
    response = attachment.request(api_key, version, message, timeout)
                                                        # blocks; KafkaException if no response
    attachment.send(api_key, version, message, on_response, timeout)
                                                        # does not wait; the driving thread calls
                                                        # on_response(response, error)
    attachment.wait_for(predicate, timeout)             # blocks until predicate() is true, and
                                                        # drives the attachment meanwhile

The C attachment takes one thread at a time. The thread with the role of the *driver* waits in C (GIL
released) for an event, then takes `lock`, processes what has arrived and gives every listener a
turn. The driver is the background thread; but a thread of the application that waits for an outcome
takes over the role, so that a response needs no switch of threads. The background thread takes the
role back when no other thread has driven for DRIVER_LEASE_S.

1. `native` is used with `lock` held, except for wait() and wake(). Only the driver replaces it
   (when it attaches again). It is never closed during a wake(), which holds `_wake_lock`.
2. Callbacks (on_response, Listener) run with `lock` held, in any thread. They do not block and
   never call the user's code.
3. Every request ends exactly once: with its response, _TIMED_OUT, _TRANSPORT (the worker died;
   whether the request took effect is unknown) or _DESTROY.
4. The driver never sleeps through a time given to wake_by(): one thread sets `_turn_requested` before
   it reads `_sleep_until`, the other sets `_sleep_until` before it reads `_turn_requested`.
5. A child of fork has no attachment: every call raises KafkaException (_STATE) there, and the
   parent's objects are not touched.
"""

from __future__ import annotations

import atexit
import collections
import errno
import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from mqd.client import requests
from mqd.client.messages import KafkaError, KafkaException, failure, local_error
from mqd.client.metadata import MetadataCache
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ProtocolError

DRIVER_LEASE_S = 0.001
CORRELATION_ID_END = 1 << 30  # the C producer's correlation ids begin here
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.01, 1.0
IDLE_WAIT_S = 60.0
ROOM_WAIT_S = 0.001  # nothing signals that requests were consumed, so this is checked again after this time

_log = logging.getLogger("mqd.client")

OnResponse = Callable[[Any, KafkaError | None], None]


class NativeClient(Protocol):
    """What an opener returns: mqd_client of native/client/client.h. Methods raise OSError; errno EPIPE:
    the worker has ended.
    """

    worker: int

    def submit(self, frame: bytes) -> bool: ...  # False: no room now
    def flush(self) -> None: ...
    def poll(self) -> None: ...
    def next_response(self) -> bytes | None: ...
    def wait(self, timeout_us: int) -> int: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    """A user of an attachment. These methods are called with the attachment's lock held. A listener
    may also have on_forked(), which is called in a child of fork.
    """

    def on_turn(self, now: float) -> float | None:
        """Called when something may have arrived, or when the returned time has come; not after a fatal
        loss. Returns the time by which the next turn must come (time.monotonic); None: the next turn
        may wait until something arrives.
        """

    def on_lost(self, error: KafkaError) -> None:
        """The worker has ended, or attaching has failed. If error.fatal(), there are no further attempts
        to attach. Requests under way get no response; `native` is still the old client.
        """

    def on_reattached(self, old: Any, new: Any) -> None:
        """`new` is the native client from now on. `old` is closed afterwards."""


class _PendingRequest:
    __slots__ = ("api_key", "deadline", "on_response", "version")

    def __init__(self, api_key: int, version: int, on_response: OnResponse, deadline: float) -> None:
        self.api_key, self.version, self.on_response, self.deadline = api_key, version, on_response, deadline


class Attachment:
    """See the module. Raises KafkaException when the first attempt to attach fails; later losses are
    repaired in the background.
    """

    def __init__(
        self,
        opener: Callable[[], NativeClient],
        *,
        client_id: str = "mqd",
        metadata_max_age_s: float = 300.0,
        request_timeout_s: float = 30.0,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._wake_lock = threading.RLock()  # no other lock is taken while it is held
        self._role_released = threading.Condition(self.lock)  # the background thread waits here to become the driver
        self._is_parked = False  # whether the background thread waits there for up to IDLE_WAIT_S
        self.client_id = client_id
        self.request_timeout_s = request_timeout_s
        self.generation = 0  # the number of attachments made so far
        self.attached = True
        self.fatal: KafkaError | None = None
        self._opener = opener
        self._pid = os.getpid()
        self._closed = False
        self._listeners: list[weakref.ref[Any]] = []
        self._correlation_ids = itertools.count(1)
        self._pending: dict[int, _PendingRequest] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of (deadline, correlation id)
        self._unsent: collections.deque[tuple[int, bytes]] = collections.deque()  # (correlation id, frame)
        self._driver: int | None = None  # the id of the thread that is the driver
        self._driven_turns = 0  # turns driven by threads of the application
        self._waiting_count = 0  # threads of the application that want to drive
        self._sleep_until = 0.0
        self._turn_requested = False
        self._backoff_s = BACKOFF_MIN_S
        self._reattach_at = 0.0
        self.native = opener()
        self.generation = 1
        self.api = requests.ApiTable({}, {})
        self.metadata = MetadataCache(self, metadata_max_age_s)
        _open_attachments.add(self)
        self._thread = threading.Thread(target=self._run, name=f"mqd-client-{client_id}", daemon=True)
        self._thread.start()
        try:
            self._request_versions(request_timeout_s)
        except BaseException:
            self.close()
            raise

    # -- requests ----------------------------------------------------------------------------------

    def send(
        self, api_key: int, version: int, message: object, on_response: OnResponse, timeout: float | None = None
    ) -> int:
        """Submits a request; returns its correlation id. Calls on_response(response, None) or
        on_response(None, error) exactly once, possibly before this returns.

        While there is no attachment the request waits for the next one, within its timeout.
        """
        self._require_usable()
        deadline = time.monotonic() + (self.request_timeout_s if timeout is None else timeout)
        with self.lock:
            correlation_id = next(self._correlation_ids)
            if correlation_id >= CORRELATION_ID_END - 1:
                self._correlation_ids = itertools.count(1)
            frame = encode_request(message, version, correlation_id, self.client_id)
            self._pending[correlation_id] = _PendingRequest(api_key, version, on_response, deadline)
            heapq.heappush(self._deadlines, (deadline, correlation_id))
            self._unsent.append((correlation_id, frame))
            if self.attached:
                self._submit_unsent()
            if not self.attached or self._unsent:
                self.wake()
            else:
                self.wake_by(deadline)
        return correlation_id

    def request(self, api_key: int, version: int, message: object, timeout: float = -1) -> Any:
        """Sends a request and returns its response. `timeout` in seconds, below 0: request_timeout_s.
        Raises KafkaException: _TIMED_OUT, _TRANSPORT (retriable), _DESTROY, _STATE.
        """
        outcome: list[tuple[Any, KafkaError | None]] = []
        limit = self.request_timeout_s if timeout < 0 else timeout
        self.send(api_key, version, message, lambda response, error: outcome.append((response, error)), limit)
        self.wait_for(lambda: outcome)
        response, error = outcome[0]
        if error is not None:
            raise KafkaException(error)
        return response

    def cancel(self, correlation_id: int) -> None:
        """Drops a request's response: on_response will not be called."""
        with self.lock:
            self._pending.pop(correlation_id, None)

    # -- listening ---------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> None:
        with self.lock:
            self._listeners.append(weakref.ref(listener))
            self.wake()

    def unsubscribe(self, listener: Listener) -> None:
        with self.lock:
            self._listeners = [reference for reference in self._listeners if reference() is not listener]

    def wake(self) -> None:
        """Gives every listener a turn soon. Any thread."""
        with self._wake_lock:
            if not self._closed:
                self.native.wake()

    def wake_by(self, due: float) -> None:
        """Like wake(), but only if the driver would sleep beyond `due`. If a turn under way may not
        have noticed `due`, another one follows before the driver sleeps (4).
        """
        self._turn_requested = True
        if due < self._sleep_until:
            self.wake()

    def wait_for(self, predicate: Callable[[], object], timeout: float = -1) -> bool:
        """Waits until predicate() is true; it is called after every turn, with the lock held. Returns
        False if `timeout` seconds (below 0: no limit) pass first.

        Must not be called with the lock held. Raises KafkaException if the attachment is closed
        meanwhile.
        """
        deadline = time.monotonic() + timeout if timeout >= 0 else float("inf")
        with self.lock:
            if predicate():
                return True
            self._require_usable()
            self._waiting_count += 1
            try:
                while True:
                    if self._driver is None:
                        self._drive_until(predicate, deadline)
                    elif self._driver == self._thread.ident:
                        self.native.wake()  # the background thread gives up the role
                        self.changed.wait(min(deadline - time.monotonic(), IDLE_WAIT_S))
                    else:
                        self.changed.wait(max(min(deadline - time.monotonic(), IDLE_WAIT_S), 0))
                    if predicate():
                        return True
                    if time.monotonic() >= deadline:
                        return False
                    self._require_usable()
            finally:
                self._waiting_count -= 1
                if self._is_parked and self._driver is None:
                    self._role_released.notify()

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the attachment immediately. Requests under way end with _DESTROY. A second call has no
        effect, nor does a call in a child of fork.
        """
        if self._closed or os.getpid() != self._pid:
            self._closed = True
            return
        with self.lock:
            self._closed = True
            self.native.wake()
            self.changed.notify_all()
            self._role_released.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self.lock:
            while self._driver is not None and self._driver != threading.get_ident():
                self.native.wake()
                self.changed.wait(0.01)
            self._fail_pending(local_error(KafkaError._DESTROY))
            with self._wake_lock:
                self.native.close()
            self.changed.notify_all()
        _open_attachments.discard(self)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _require_usable(self) -> None:
        if os.getpid() != self._pid:
            raise failure(KafkaError._STATE, "this client was made before fork(): make a new one in the child process")
        if self._closed:
            raise failure(KafkaError._DESTROY, "the client is closed")
        if self.fatal is not None:
            raise KafkaException(self.fatal)

    def _request_versions(self, timeout: float) -> None:
        self.api = requests.ApiTable.read(
            self.request(requests.API_VERSIONS, 3, requests.api_versions_request(), timeout)
        )

    def _on_versions(self, response: Any, error: KafkaError | None) -> None:
        if error is None and not response.error_code:
            self.api = requests.ApiTable.read(response)

    # -- the driver --------------------------------------------------------------------------------

    def _run(self) -> None:
        """The background thread."""
        thread_id, driven_before = threading.get_ident(), -1
        with self.lock:
            while not self._closed and self.fatal is None:
                if self._driver is not None or self._waiting_count or self._driven_turns != driven_before:
                    # if no other thread has driven since the last check, wait longer
                    self._is_parked = self._driven_turns == driven_before
                    driven_before = self._driven_turns
                    self._role_released.wait(IDLE_WAIT_S if self._is_parked else DRIVER_LEASE_S)
                    self._is_parked = False
                    continue
                self._drive_once(thread_id, float("inf"))
                self.changed.notify_all()

    def _drive_until(self, predicate: Callable[[], object], deadline: float) -> None:
        thread_id = threading.get_ident()
        try:
            while not self._closed and self.fatal is None:
                self._driven_turns += 1
                self._drive_once(thread_id, deadline, predicate)
                if predicate() or time.monotonic() >= deadline:
                    break
        finally:  # also after Ctrl-C: another waiting thread takes over the role
            self.changed.notify_all()

    def _drive_once(self, thread_id: int, deadline: float, predicate: Callable[[], object] | None = None) -> None:
        """Does one turn, waits (with the lock released), and does another turn. On entry and exit the
        lock is held and there is no driver.
        """
        self._driver = thread_id
        try:
            self._turn_requested = False
            due = min(self._turn(), deadline)
            if (predicate is not None and predicate()) or self._closed or self.fatal is not None:
                return
            self._sleep_until = due
            native, wait_us = (
                self.native,
                (0 if self._turn_requested else int(max(min(due - time.monotonic(), IDLE_WAIT_S), 0) * 1e6)),
            )
            self.lock.release()
            try:
                if self.attached:
                    native.wait(wait_us)
                elif not self._is_reattach_due():
                    time.sleep(min(wait_us / 1e6, self._backoff_s))
            except OSError:
                pass  # the turn detects the cause
            finally:
                self.lock.acquire()
                self._sleep_until = 0.0
            self._turn()
        finally:
            self._driver = None

    def _turn(self) -> float:
        """Processes arrivals and gives every listener a turn. Returns the time at which the next turn is
        due. Called by the driver, with the lock held. A bug in the client ends the attachment, because
        a turn may have been half done, and callers could wait forever.
        """
        try:
            return self._turn_unprotected()
        except Exception as error:
            _log.exception("%s: the client has failed", self.client_id)
            self._end_permanently(local_error(KafkaError._FATAL, f"a fault in the client: {error!r}", fatal=True))
            return time.monotonic()

    def _turn_unprotected(self) -> float:
        now = time.monotonic()
        if self._closed:
            return now
        if not self.attached:
            self._maybe_reattach(now)
        if self.fatal is not None:
            return now
        if self.attached:
            try:
                self.native.poll()
                self._take_responses()
                self._submit_unsent()
            except OSError as error:
                self._handle_loss(error)
        due = min(self._expire(now), self.metadata.on_turn(now))
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                listener_due = listener.on_turn(now)
                if listener_due is not None and listener_due < due:
                    due = listener_due
        if self.attached:
            try:
                self.native.flush()
            except OSError as error:
                self._handle_loss(error)
        if not self.attached:
            return min(due, self._reattach_at)
        return min(due, now + ROOM_WAIT_S) if self._unsent else due

    def _submit_unsent(self) -> None:
        try:
            while self._unsent:
                correlation_id, frame = self._unsent[0]
                if correlation_id in self._pending and not self.native.submit(frame):
                    break
                self._unsent.popleft()
            self.native.flush()
        except OSError as error:
            self._handle_loss(error)

    def _take_responses(self) -> None:
        while (frame := self.native.next_response()) is not None:
            pending = self._pending.pop(int.from_bytes(frame[:4], "big"), None)
            if pending is None:
                continue  # it had timed out
            try:
                response = decode_response(frame, pending.api_key, pending.version)[1]
            except ProtocolError as error:
                pending.on_response(None, local_error(KafkaError._BAD_MSG, str(error)))
                continue
            pending.on_response(response, None)

    def _expire(self, now: float) -> float:
        while self._deadlines:
            deadline, correlation_id = self._deadlines[0]
            if correlation_id in self._pending:
                if deadline > now:
                    return deadline
                self._pending.pop(correlation_id).on_response(None, local_error(KafkaError._TIMED_OUT, retriable=True))
            heapq.heappop(self._deadlines)
        return float("inf")

    def _fail_pending(self, error: KafkaError) -> None:
        """Fails all requests under way. Requests that were never sent fail only if the attachment has
        ended for good.
        """
        unsent = {correlation_id for correlation_id, _ in self._unsent} if not self._closed else set()
        for correlation_id in [number for number in self._pending if number not in unsent]:
            self._notify(self._pending.pop(correlation_id).on_response, None, error)

    # -- losing and finding the broker -------------------------------------------------------------

    def _handle_loss(self, error: OSError) -> None:
        if not self.attached or self._closed:
            return
        self.attached = False
        self._backoff_s = BACKOFF_MIN_S
        self._reattach_at = time.monotonic()
        reason = "the worker has ended" if error.errno == errno.EPIPE else str(error)
        _log.info("%s: lost the broker (%s); attaching again", self.client_id, reason)
        lost = local_error(KafkaError._TRANSPORT, f"Local: shared memory: {reason}", retriable=True)
        self._fail_pending(lost)
        self._notify_lost(lost)

    def _notify_lost(self, error: KafkaError) -> None:
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                self._notify(listener.on_lost, error)

    def _notify(self, callback: Callable[..., object], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception:
            if self.fatal is None:
                raise  # _turn() then ends the attachment and notifies all listeners
            # otherwise the other listeners would not be notified
            _log.exception("%s: a fault in the client while it was being ended", self.client_id)

    def _is_reattach_due(self) -> bool:
        return time.monotonic() >= self._reattach_at

    def _maybe_reattach(self, now: float) -> None:
        """Called by the driver; releases the lock while it connects."""
        if now < self._reattach_at or self.fatal is not None:
            return
        old = self.native
        new: NativeClient | None = None
        problem: OSError | KafkaException | None = None
        self.lock.release()
        try:
            new = self._opener()
        except (OSError, KafkaException) as error:
            problem = error
        finally:
            self.lock.acquire()
        if new is None:
            assert problem is not None
            self._on_attach_failed(problem)
            return
        if self._closed:
            new.close()
            return
        try:
            self._set_native(new, True)
            self.generation += 1
            for reference in self._listeners:
                listener = reference()
                if listener is not None:
                    listener.on_reattached(old, new)
        except OSError as error:  # the new attachment has too little memory, or has ended already
            self._set_native(old, False)
            new.close()
            self._on_attach_failed(error)
            return
        except BaseException:
            # Ctrl-C before all listeners have moved to `new`: the next turn attaches again. Neither
            # client is closed, because a producer's batches are in one of them.
            self.attached = False
            raise
        self._backoff_s = BACKOFF_MIN_S
        old.close()
        # the broker may now be of another version
        self.send(requests.API_VERSIONS, 3, requests.api_versions_request(), self._on_versions)
        self.metadata.expire()
        self.changed.notify_all()

    def _set_native(self, native: NativeClient, attached: bool) -> None:
        """Replaces `native`. From then on wake() does not use the previous client, so it can be closed."""
        with self._wake_lock:
            self.native, self.attached = native, attached

    def _on_attach_failed(self, problem: BaseException) -> None:
        error = (
            problem.args[0]
            if isinstance(problem, KafkaException)
            else local_error(KafkaError._TRANSPORT, f"Local: shared memory: {problem}", retriable=True)
        )
        self._reattach_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
        if error.fatal():
            self._end_permanently(error)
            return
        self._notify_lost(error)
        self.changed.notify_all()

    def _end_permanently(self, error: KafkaError) -> None:
        if self.fatal is not None:
            return  # later errors are consequences of the first
        self.fatal = error
        self._unsent.clear()
        self._fail_pending(error)
        self._notify_lost(error)
        self.changed.notify_all()


_open_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _close_all() -> None:
    """Called when the interpreter exits: after this, no thread of this module may wait in C."""
    for attachment in list(_open_attachments):
        attachment.close()


def _forget_in_child() -> None:
    """In a child of fork: replaces the locks, because a lock that another thread of the parent held
    is never released here.
    """
    for attachment in list(_open_attachments):
        attachment.lock = threading.RLock()
        attachment.changed = threading.Condition(attachment.lock)
        attachment._wake_lock = threading.RLock()
        attachment._driver = None
        for reference in attachment._listeners:
            on_forked = getattr(reference(), "on_forked", None)
            if on_forked is not None:
                on_forked()
    _open_attachments.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
