"""Tests of bounded waits for clients, and of bodies in any number of parts."""

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest

from libs.contracts.errors import BodyTooLarge, InvalidRequest, QueueFull
from services.gateway.request.exchange import BODY_TIMEOUT_S, ClientGone, ReadDeadline, Stalls, read_body

ROOM = 4096


async def waits(stalls: Stalls, *, in_time: bool) -> None:
    with stalls.watched() as patience:
        patience.wait(5.0, lambda: InvalidRequest("late"))
        if in_time:
            patience.done()
        await asyncio.Event().wait()


async def started(stalls: Stalls, *, in_time: bool = False) -> "asyncio.Task[None]":
    task = asyncio.create_task(waits(stalls, in_time=in_time))
    await asyncio.sleep(0)
    return task


async def test_a_wait_over_its_limit_ends_with_its_own_error() -> None:
    stalls, now_s = Stalls(8, ROOM), asyncio.get_running_loop().time()
    task = await started(stalls)
    stalls.look(now_s + 4.0)
    await asyncio.sleep(0)
    assert not task.done()
    stalls.look(now_s + 6.0)
    stalls.look(now_s + 7.0)
    with pytest.raises(InvalidRequest, match="late"):
        await task


async def test_a_client_within_the_limit_is_not_interrupted() -> None:
    stalls = Stalls(8, ROOM)
    task = await started(stalls, in_time=True)
    stalls.look(asyncio.get_running_loop().time() + 100.0)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_that_times_out_and_is_cancelled_ends_as_cancelled() -> None:
    stalls = Stalls(8, ROOM)
    task = await started(stalls)
    stalls.look(asyncio.get_running_loop().time() + 6.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def read(*parts: bytes, max_bytes: int = 1024, headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if b"" in parts else {"type": "http.request", "body": b"."})
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    task = asyncio.current_task()
    assert task is not None
    return await read_body(receive, dict(headers), max_bytes, ReadDeadline(task), Stalls(8, ROOM))


async def test_a_body_in_many_parts_is_joined_within_its_bound() -> None:
    assert await read(*[b"x"] * 1000) == b"x" * 1000 + b"."
    with pytest.raises(BodyTooLarge):
        await read(*[b"x"] * 1024)
    with pytest.raises(BodyTooLarge):
        await read(headers=((b"content-length", b"1025"),))
    with pytest.raises(ClientGone):
        await read(b"x", b"")


async def test_a_body_that_does_not_arrive_raises_a_timeout_error() -> None:
    stalls = Stalls(8, ROOM)
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        with stalls.watched() as patience:
            await read_body(loop.create_future, {}, 10, patience, stalls)  # type: ignore[arg-type]

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    stalls.look(loop.time() + BODY_TIMEOUT_S + 1)
    with pytest.raises(InvalidRequest, match="did not arrive"):
        await task


async def test_the_bytes_of_all_bodies_are_bounded_until_their_answers_end() -> None:
    stalls = Stalls(8, 100)
    with stalls.watched() as first:
        stalls.hold(first, 60)
        with stalls.watched() as second:
            stalls.hold(second, 40)
            with pytest.raises(QueueFull) as caught:
                stalls.hold(second, 1)
            assert caught.value.retry_after_s
        assert stalls.body_bytes == 60
        with stalls.watched() as third:
            stalls.hold(third, 40)
    assert stalls.body_bytes == 0


class Apart:
    are_distinct = True

    def weight(self, _tenant: str) -> int:
        return 1


async def test_a_tenant_leaves_room_for_others_in_open_requests_and_their_bodies() -> None:
    stalls = Stalls(8, 100, Apart())
    with ExitStack() as stack:
        for _ in range(4):
            stalls.check_room("flood")
            stack.enter_context(stalls.watched("flood"))
        with pytest.raises(QueueFull, match="tenant flood"):
            stalls.check_room("flood")
        stalls.check_room("modest")
    with stalls.watched("flood") as first, stalls.watched("flood") as second, stalls.watched("modest") as other:
        stalls.hold(first, 40)
        stalls.hold(second, 10)
        with pytest.raises(QueueFull, match="tenant flood"):
            stalls.hold(second, 10)
        stalls.hold(other, 25)
    assert (len(stalls), stalls.body_bytes) == (0, 0)
    with stalls.watched("flood") as alone:
        stalls.hold(alone, 60)
        stalls.hold(alone, 40)
