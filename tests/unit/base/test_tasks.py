"""Coroutines that run without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from mqd.base import tasks
from mqd.base.tasks import InlineCoroutine, PromptFuture, Turn


def begun(coroutine: Coroutine[object, object, None], turn: Turn | None = None) -> InlineCoroutine:
    work = InlineCoroutine(turn or Turn(), coroutine)
    work.start()
    return work


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_one_that_does_not_wait_ends() -> None:
    done: list[int] = []

    async def coroutine() -> None:
        done.append(1)

    assert begun(coroutine()).done() and done == [1]


def test_what_it_raises_at_once_is_raised() -> None:
    async def coroutine() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        begun(coroutine())


def test_the_rest_is_run_as_a_task() -> None:
    seen: list[object] = []

    async def coroutine() -> None:
        seen.append(await asyncio.get_running_loop().run_in_executor(None, lambda: 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        async with asyncio.timeout(10):  # by now there is a task
            seen.append(2)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def body() -> None:
        ended: list[InlineCoroutine] = []
        work = begun(coroutine())
        work.add_done_callback(ended.append)
        await until(lambda: len(seen) == 2)
        await asyncio.sleep(0)
        work.cancel()
        await until(work.done)
        assert seen == [1, 2, "cancelled"] and ended == [work]

    asyncio.run(body())


def test_a_prompt_resumes_it_at_the_end_of_the_turn() -> None:
    seen: list[object] = []

    async def coroutine(prompts: list[PromptFuture[int]]) -> None:
        for prompt in prompts:
            try:
                seen.append(await prompt)
            except ValueError:
                seen.append("failed")
        assert asyncio.current_task() is None

    async def body() -> None:
        turn, prompts = Turn(), [PromptFuture[int]() for _ in range(3)]
        ended: list[InlineCoroutine] = []
        turn.is_in_progress = True
        work = begun(coroutine(prompts), turn)
        work.add_done_callback(ended.append)
        prompts[0].set_result(0)
        assert not seen  # not in the middle of what set the result
        prompts[1].set_exception(ValueError())
        turn.run()
        assert seen == [0, "failed"] and not work.done()
        turn.is_in_progress = False
        prompts[2].set_result(2)
        assert not work.done()
        await asyncio.sleep(0)  # without an open turn: in the loop's next one
        assert seen == [0, "failed", 2] and ended == [work]

    asyncio.run(body())


def test_a_prompt_is_a_future_for_a_task() -> None:
    async def body() -> None:
        prompt: PromptFuture[int] = PromptFuture()
        asyncio.get_running_loop().call_soon(prompt.set_result, 5)
        assert await asyncio.wait_for(prompt, 10) == 5

    asyncio.run(body())


def test_two_that_wait_for_one_prompt() -> None:
    seen: list[int] = []

    async def coroutine(prompt: PromptFuture[int]) -> None:
        seen.append(await prompt)

    async def body() -> None:
        prompt: PromptFuture[int] = PromptFuture()
        works = [begun(coroutine(prompt)) for _ in range(2)]
        prompt.set_result(7)
        await until(lambda: all(work.done() for work in works))
        assert seen == [7, 7]

    asyncio.run(body())


@pytest.mark.parametrize("has_result", [False, True])
def test_one_that_waits_for_a_prompt_is_cancelled(has_result: bool) -> None:
    seen: list[str] = []

    async def coroutine(prompt: PromptFuture[int]) -> None:
        try:
            await prompt
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        seen.append("resumed")

    async def body() -> None:
        turn, prompt = Turn(), PromptFuture[int]()
        turn.is_in_progress = True
        work = begun(coroutine(prompt), turn)
        if has_result:
            prompt.set_result(1)
        work.cancel()
        assert not seen
        turn.run()
        assert seen == ["cancelled"] and work.done()
        work.cancel()
        if not has_result:
            prompt.set_result(1)
        turn.run()
        assert seen == ["cancelled"]

    asyncio.run(body())


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize("from_inside", [False, True])
def test_one_that_is_cancelled_before_or_just_after_it_waits(is_prompt: bool, from_inside: bool) -> None:
    seen: list[str] = []
    works: list[InlineCoroutine] = []

    async def coroutine(first: PromptFuture[int], second: asyncio.Future[int]) -> None:
        await first
        if from_inside:
            works[0].cancel()
        try:
            await second
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def body() -> None:
        turn, first = Turn(), PromptFuture[int]()
        turn.is_in_progress = True
        works.append(begun(coroutine(first, PromptFuture() if is_prompt else asyncio.Future()), turn))
        first.set_result(1)
        turn.run()
        turn.is_in_progress = False
        if not from_inside:
            works[0].cancel()
        await until(works[0].done)
        assert seen == ["cancelled", "cleaned up"]

    asyncio.run(asyncio.wait_for(body(), 5))


def test_a_cancelled_prompt() -> None:
    async def coroutine(prompt: PromptFuture[int]) -> None:
        await prompt

    async def body() -> None:
        turn, prompt = Turn(), PromptFuture[int]()
        work = begun(coroutine(prompt), turn)
        prompt.cancel()
        await asyncio.sleep(0)
        assert work.done()

    asyncio.run(body())


def test_a_task_is_made_for_a_timeout() -> None:
    seen: list[object] = []

    async def coroutine(prompt: PromptFuture[int]) -> None:
        seen.append(await prompt)
        async with tasks.timeout(60):
            task = asyncio.current_task()
            seen.append(2)
        try:
            async with tasks.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            seen.append("late")
        assert asyncio.current_task() is task

    async def body() -> None:
        prompt: PromptFuture[int] = PromptFuture()
        work = begun(coroutine(prompt))
        prompt.set_result(1)
        await until(work.done)
        assert seen == [1, 2, "late"]

    asyncio.run(body())


def test_requests_use_a_timeout_that_makes_a_task() -> None:
    """Their handlers run as InlineCoroutines. These modules wait in tasks of their own."""
    own = {"acceptor/dead_letters.py", "acceptor/interbroker/channel.py", "acceptor/interbroker/client.py"}
    root = Path(tasks.__file__).parents[1]
    found = {
        str(path.relative_to(root))
        for package in ("acceptor", "coordinator")
        for path in (root / package).rglob("*.py")
        if any(name in path.read_text() for name in ("asyncio.timeout(", "asyncio.wait_for(", "TaskGroup"))
    }
    assert found == own


def test_a_callback_that_fails_does_not_stop_the_others() -> None:
    called: list[int] = []

    def fails() -> None:
        raise KeyError

    async def body() -> None:
        turn = Turn()
        turn.call(fails)
        turn.call(lambda: called.append(1))
        await asyncio.sleep(0)
        assert called == [1]
        turn.call(lambda: turn.call(lambda: called.append(2)))
        await asyncio.sleep(0)
        assert called == [1, 2]

    asyncio.run(body())
