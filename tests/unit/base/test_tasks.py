"""Coroutines that begin without a task."""

from __future__ import annotations

import asyncio

import pytest

from mqd.base import tasks


def test_one_that_does_not_wait_ends() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert tasks.begin(work()) is None and done == [1]


def test_what_it_raises_at_once_is_raised() -> None:
    async def work() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        tasks.begin(work())


def test_the_rest_is_run_as_a_task() -> None:
    seen: list[object] = []

    async def work() -> None:
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
        rest = tasks.begin(work())
        assert rest is not None
        task = asyncio.create_task(rest)
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == [1, 2, "cancelled"]

    asyncio.run(body())


def test_what_the_rest_raises_is_the_tasks() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise KeyError

    async def body() -> None:
        rest = tasks.begin(work())
        assert rest is not None
        with pytest.raises(KeyError):
            await asyncio.create_task(rest)

    asyncio.run(body())
