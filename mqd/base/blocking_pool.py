"""Questions to what may hang, a file system before all. They are asked in threads that nobody waits
for at the end (those of an executor are waited for).
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(question: Callable[[], T]) -> "asyncio.Future[T]":
    """The answer, when there is one. Raises RuntimeError: no thread can be started."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def ask() -> None:
        try:
            found = question()
            tell = lambda: answer.done() or answer.set_result(found)
        except StopIteration as error:  # which a future does not take
            raised: Exception = RuntimeError(f"a question has raised StopIteration: {error.value!r}")
            tell = lambda: answer.done() or answer.set_exception(raised)
        except Exception as error:
            raised = error
            tell = lambda: answer.done() or answer.set_exception(raised)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=ask, name="asking", daemon=True).start()
    return answer


class UnderWay:
    """What the asked says of itself, from its thread; who asks looks at it."""

    def __init__(self) -> None:
        self.stepped_s = time.monotonic()
        self.answer: asyncio.Future[Any]

    def step(self) -> None:
        self.stepped_s = time.monotonic()

    def let_go(self) -> None:
        """What comes now is its own work: it may take as long as it likes."""
        self.stepped_s = math.inf

    async def ended(self, silent_s: float) -> bool:
        """False: it has taken no step for so long."""
        while not self.answer.done():
            left_s = self.stepped_s + silent_s - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.wait({self.answer}, timeout=left_s)
        return True


class Questions:
    """Each of those that are asked is asked one question at a time: one that hangs takes one
    thread, however often it is asked for. Concurrency: the event loop's thread.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, UnderWay] = {}

    async def ask(self, whom: Hashable, question: Callable[[Callable[[], None]], T], silent_s: float) -> T:
        """`question` gets a function that it calls whenever it has got on. Raises TimeoutError:
        nothing has been heard of `whom` for `silent_s`, and what the question before this one does
        counts too. RuntimeError: no thread can be started.
        """
        # one that is done has no place to wait in
        while (before := self._under_way.get(whom)) is not None and not before.answer.done():
            if not await before.ended(silent_s):
                raise TimeoutError(f"{whom} does not answer")
        mine = UnderWay()
        mine.answer = in_thread(lambda: question(mine.step))
        self._under_way[whom] = mine  # once it has a thread
        mine.answer.add_done_callback(lambda _: self._forget(whom, mine))
        if not await mine.ended(silent_s):
            raise TimeoutError(f"{whom} does not answer")
        return mine.answer.result()

    def _forget(self, whom: Hashable, done: UnderWay) -> None:
        """The next one may be under way already."""
        if self._under_way.get(whom) is done:
            del self._under_way[whom]
