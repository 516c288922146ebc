"""Accepting connections that the kernel does not give out."""

import asyncio
import errno

import pytest

from mqd.acceptor import accepting
from mqd.acceptor.accepting import Acceptor
from tests.unit.worker.refusing_listener import RefusingListener


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EMFILE, errno.EOPNOTSUPP])
def test_accepting_pauses_when_nobody_can_be_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """What waits stays readable: without a pause the acceptor would go round for ever."""

    async def scenario() -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        listener = RefusingListener([code] * 3)
        acceptor = Acceptor([listener], [], lambda worker: 0, lambda worker: True)  # type: ignore[list-item]
        monkeypatch.setattr(accepting, "PAUSE_S", 3600.0)
        acceptor.start(asyncio.get_running_loop())
        await turns(20)
        assert listener.asked == 1 and len(caplog.records) == 1 and ("ulimit" in caplog.text) == (code == errno.EMFILE)
        acceptor._resume_unless_full()
        await turns(20)
        assert listener.asked == 2 and not faults
        acceptor.stop()
        listener.close()

    asyncio.run(scenario())


def test_who_left_before_it_was_served_is_passed_over() -> None:
    async def scenario() -> None:
        listener = RefusingListener([errno.ECONNABORTED, errno.EPROTO])
        acceptor = Acceptor([listener], [], lambda worker: 0, lambda worker: True)  # type: ignore[list-item]
        acceptor.start(asyncio.get_running_loop())
        await turns(3)
        assert listener.asked >= 3 and not acceptor._paused
        acceptor.stop()
        listener.close()

    asyncio.run(scenario())
