"""Request quotas for the acceptor's responses (KIP-124): the time that this loop spent on a request
is charged to its client, and the response tells the client how long to wait. The worker that holds
the connection sees the debt in the control segment and reads no further request until it is paid.

Only CPU work counts: a request that waits for the disk, the controller or other members of its
group does not delay others. Requests between hosts of the cluster are not charged, nor is
authentication.

Also the quotas of partition mutations (KIP-599).
"""

import asyncio
import time
from collections.abc import Awaitable, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from mqd.acceptor.broker import Context
from mqd.native import QuotaKind
from mqd.protocol.headers import RequestHeader

MUTATION_UNITS = 1_000_000  # units that one changed partition costs (mqd/controller/quotas.py)
_SASL_HANDSHAKE, _SASL_AUTHENTICATE = 17, 36


class TimedAwaitable:
    """An awaitable that sums the duration of its steps in `work_ns`."""

    def __init__(self, awaitable: Awaitable[object]) -> None:
        self._awaitable = awaitable
        self.work_ns = 0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._awaitable.__await__()
        send: Any = None
        raised: BaseException | None = None
        while True:
            began = time.perf_counter_ns()
            try:
                waits_for = steps.send(send) if raised is None else steps.throw(raised)
            except StopIteration as done:
                return done.value
            finally:
                self.work_ns += time.perf_counter_ns() - began
            send = raised = None
            try:
                send = yield waits_for
            # A cancellation, or an error from the awaited future: the handler deals with it.
            except BaseException as error:
                raised = error


def _is_limited(context: Context, kind: QuotaKind) -> bool:
    return not context.origin.is_trusted and bool(context.broker.quotas.refresh() >> kind & 1)


def is_charged(context: Context, header: RequestHeader) -> bool:
    """Whether run_and_charge() is needed for this request."""
    return _is_limited(context, QuotaKind.REQUEST) and header.api_key not in (_SASL_HANDSHAKE, _SASL_AUTHENTICATE)


def _charge(context: Context, header: RequestHeader, kind: QuotaKind, units: int) -> int:
    """Charges the client. Returns how long it must wait, in ns."""
    user, client_id = context.origin.user.encode(), (header.client_id or "").encode()
    return context.broker.quotas.charge(user, client_id, kind, units, time.monotonic_ns())


def _to_ms(delay_ns: int) -> int:
    return min(-(-delay_ns // 1_000_000), 2**31 - 1)


class MutationQuota:
    """The quota controller_mutation_rate, applied to one request (KIP-599). If the client is over its
    quota, the request is refused if `is_strict` (its version has an error code for this case).
    Otherwise it is served, and its connection is not read again until the quota permits.
    """

    def __init__(self, context: Context, header: RequestHeader, is_strict: bool) -> None:
        self._context, self._header, self._is_strict = context, header, is_strict
        self._is_enabled = _is_limited(context, QuotaKind.MUTATION)
        # one change at a time, so that each is charged before the next is checked
        self.lock: AbstractAsyncContextManager[object] = asyncio.Lock() if self._is_enabled else nullcontext()
        self.throttle_time_ms = 0

    def must_refuse(self) -> bool:
        """Whether the next change must be refused: never if `is_strict` is False."""
        if not self._is_enabled or not self._is_strict:
            return False
        owed_ns = _charge(self._context, self._header, QuotaKind.MUTATION, 0)
        self.throttle_time_ms = max(self.throttle_time_ms, _to_ms(owed_ns))
        return owed_ns > 0

    def charge(self, partition_count: int) -> None:
        if self._is_enabled:
            delay_ns = _charge(self._context, self._header, QuotaKind.MUTATION, partition_count * MUTATION_UNITS)
            self.throttle_time_ms = 0 if self._is_strict else _to_ms(delay_ns)


async def run_and_charge(
    handling: Awaitable[object], context: Context, header: RequestHeader, began_s: float
) -> object:
    """Runs the handler, charges the client for its time, and sets the throttle time in its response.
    The time spent since `began_s` (perf_counter) counts too.
    """
    measured = TimedAwaitable(handling)
    decoding_ns = int((time.perf_counter() - began_s) * 1e9)
    try:
        response: Any = await measured
    finally:
        delay_ns = _charge(context, header, QuotaKind.REQUEST, decoding_ns + measured.work_ns)
    if delay_ns and getattr(response, "throttle_time_ms", None) is not None:
        response.throttle_time_ms = max(response.throttle_time_ms, _to_ms(delay_ns))
        context.is_cacheable = False
    return response
