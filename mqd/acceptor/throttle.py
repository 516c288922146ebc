"""Request quotas for the acceptor's answers (KIP-124): the time that this loop spent on a request
is charged to its client id, and the answer tells the client how long to wait. The worker that holds
the connection sees the debt in the control segment and reads no further request until it is paid.

Only CPU work counts: a request that waits for the disk, the controller or other members of its
group does not delay others.
"""

import time
from collections.abc import Awaitable, Generator
from typing import Any

from mqd.acceptor.broker import Context
from mqd.native import QuotaKind
from mqd.protocol.framing import RequestHeader

REQUEST_BIT = 1 << QuotaKind.REQUEST


class Measured:
    """An awaitable that sums the duration of its steps in `work_ns`."""

    def __init__(self, work: Awaitable[object]) -> None:
        self._work = work
        self.work_ns = 0

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
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
            # A cancellation, or the error of what it awaited: the handler deals with it.
            except BaseException as error:
                raised = error


async def charged(handling: Awaitable[object], context: Context, header: RequestHeader, began_s: float) -> object:
    """Runs the handler; its answer carries the throttle time. The time spent since `began_s`
    (perf_counter) counts too.
    """
    measured = Measured(handling)
    decoding_ns = int((time.perf_counter() - began_s) * 1e9)
    try:
        response: Any = await measured
    finally:
        client_id = (header.client_id or "").encode()
        delay_ns = context.broker.quotas.charge(
            client_id, QuotaKind.REQUEST, decoding_ns + measured.work_ns, time.monotonic_ns()
        )
    if delay_ns and getattr(response, "throttle_time_ms", None) is not None:
        response.throttle_time_ms = max(response.throttle_time_ms, min(-(-delay_ns // 1_000_000), 2**31 - 1))
        context.cacheable = False
    return response
