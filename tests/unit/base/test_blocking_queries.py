"""Calls that may hang: no caller waits for long, and a hung call occupies one thread."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import pytest

from mqd.base import blocking_queries as queries
from mqd.base.blocking_queries import BlockingQueries


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_slow_work_is_awaited_and_hung_work_is_abandoned() -> None:
    async def scenario() -> None:
        def slow(stepped: Callable[[], None]) -> str:
            for _ in range(4):
                time.sleep(0.3)
                stepped()
            return "done"

        questions, let_go = BlockingQueries(), threading.Event()
        assert await questions.run("slow", slow, 1.0) == "done"
        with pytest.raises(TimeoutError, match="hung does not respond"):
            await questions.run("hung", lambda stepped: let_go.wait(60), 0.05)
        let_go.set()

    run(scenario())


def test_each_key_has_one_call_at_a_time_and_does_not_delay_others() -> None:
    async def scenario() -> None:
        questions, let_go, requested = BlockingQueries(), threading.Event(), []

        def hanging(stepped: Callable[[], None]) -> int:
            requested.append(1)
            assert let_go.wait(60)
            return len(requested)

        for _ in range(3):
            with pytest.raises(TimeoutError):
                await questions.run("a", hanging, 0.05)
        assert len(requested) == 1 and await questions.run("b", lambda stepped: 7, 20) == 7
        later = [asyncio.create_task(questions.run("a", hanging, 20)) for _ in range(3)]
        let_go.set()
        assert sorted(await asyncio.gather(*later)) == [2, 3, 4]

    run(scenario())


def test_errors_of_a_call_are_raised_and_the_next_one_runs() -> None:
    async def scenario() -> None:
        def failing(stepped: Callable[[], None]) -> None:
            raise ValueError("our own fault")

        questions = BlockingQueries()
        for _ in range(2):
            with pytest.raises(ValueError, match="our own fault"):
                await questions.run("a", failing, 20)

    run(scenario())


def test_a_call_that_raises_stop_iteration_ends_too() -> None:
    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(queries.in_thread(lambda: next(iter(()))), 20)

    run(scenario())


def test_a_call_without_a_thread_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        def refused(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        questions = BlockingQueries()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="new thread"):
                await questions.run("a", lambda stepped: 1, 20)
        assert await questions.run("a", lambda stepped: 2, 20) == 2

    run(scenario())


def test_a_call_in_the_turn_of_a_response_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to loop endlessly without yielding, and the acceptor with it: the event loop delivers
    a response one turn later.
    """

    async def scenario() -> None:
        responses: list[asyncio.Future[int]] = []

        def requested(question: Callable[[], int]) -> asyncio.Future[int]:
            responses.append(asyncio.get_running_loop().create_future())
            return responses[-1]

        monkeypatch.setattr(queries, "in_thread", requested)
        questions = BlockingQueries()
        first = asyncio.create_task(questions.run("a", lambda stepped: 0, 20))
        await asyncio.sleep(0)
        second = asyncio.create_task(questions.run("a", lambda stepped: 0, 20))  # its turn comes
        responses[0].set_result(1)  # before those that wait for this
        await asyncio.sleep(0)
        assert len(responses) == 2 and await first == 1
        third = asyncio.create_task(questions.run("a", lambda stepped: 0, 20))
        await asyncio.sleep(0)
        assert len(responses) == 2, "the second one is under way: the first one's end does not forget it"
        responses[1].set_result(2)
        assert await second == 2 and len(responses) == 3
        responses[2].set_result(3)
        assert await third == 3

    def gone_round(number: int, frame: object) -> None:
        raise AssertionError("asking went round without giving the loop a turn")

    before = signal.signal(signal.SIGALRM, gone_round)
    signal.alarm(20)
    try:
        run(scenario())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
