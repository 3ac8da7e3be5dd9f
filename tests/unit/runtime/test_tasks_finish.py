"""Tests of work that goes on to its end although its caller is cancelled."""

import asyncio
import gc
from typing import Any

import pytest

from libs.runtime.tasks import end, finish


async def test_work_ends_before_its_cancelled_caller_does_however_often_it_is_cancelled() -> None:
    go, ended = asyncio.Event(), []

    async def work() -> None:
        await go.wait()
        ended.append("work")

    async def call() -> None:
        try:
            await finish("work", work())
        finally:
            ended.append("caller")

    caller = asyncio.get_running_loop().create_task(call())
    for _ in range(3):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not ended
    go.set()
    await end(caller)
    assert ended == ["work", "caller"]
    assert caller.cancelled()


async def test_the_error_of_work_whose_caller_was_cancelled_is_not_reported_as_unread() -> None:
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))

    async def work() -> None:
        await asyncio.sleep(0)
        raise OSError("the broker is away")

    caller = loop.create_task(finish("work", work()))
    await asyncio.sleep(0)
    await end(caller)
    assert caller.cancelled()
    del caller
    gc.collect()
    assert reported == []


async def test_the_caller_gets_the_result_or_the_error() -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return 6 // number

    assert await finish("work", work(2)) == 3
    with pytest.raises(ZeroDivisionError):
        await finish("work", work(0))
