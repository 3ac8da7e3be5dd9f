"""Tests of the publication of a worker's blocks to the KV index."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from libs.engine.reports import BlockEvents, EngineEvent
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingKvIndex
from libs.worker.kv_server import BlockPublisher

NAMES = [bytes([number]) for number in range(50)]


class HeldUpIndex(RecordingKvIndex):
    """A store that can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.calls += 1
        await self.answers.wait()
        await super().publish(model, worker_id, stored=stored, removed=removed)


@asynccontextmanager
async def published(index: HeldUpIndex) -> AsyncIterator[BlockPublisher]:
    publisher = BlockPublisher(index, "model", "prefill-0", lease_ms=10_000)
    running = asyncio.create_task(publisher.run())
    yield publisher
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def change(*, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> EngineEvent:
    return EngineEvent(blocks=BlockEvents(tuple(stored), tuple(removed)))


async def test_the_first_change_is_published_at_once_and_later_ones_share_a_call() -> None:
    index = HeldUpIndex()
    async with published(index) as publisher:
        publisher.on_event(change(stored=NAMES[:1]))
        await until(lambda: index.blocks == {NAMES[0]}, what="the first block in the index")
        for name in NAMES[1:]:
            publisher.on_event(change(stored=[name]))
            await asyncio.sleep(0)
        publisher.on_event(change(removed=[NAMES[7]]))
        await until(lambda: index.blocks == {*NAMES} - {NAMES[7]}, what="all changes in the index")
        assert index.calls <= 3


async def test_more_changes_than_the_bound_leave_the_index_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.worker.kv_server.MAX_PENDING_BLOCKS", 8)
    index = HeldUpIndex()
    async with published(index) as publisher:
        publisher.on_event(change(stored=NAMES[:6]))
        await until(lambda: index.blocks == {*NAMES[:6]}, what="blocks in the index")
        index.answers.clear()
        publisher.on_event(change(stored=[NAMES[6]]))
        await until(lambda: index.calls == 2, what="a call that hangs")
        publisher.on_event(change(removed=NAMES[:6]))  # the oldest of what waits now
        publisher.on_event(change(stored=NAMES[10:20]))
        publisher.on_event(change(removed=NAMES[10:12]))
        index.answers.set()
        held = {NAMES[6], *NAMES[12:20]}
        await until(lambda: index.blocks == held, what="all that is held, and nothing else")
        publisher.on_event(change(stored=NAMES[30:31], removed=NAMES[12:14]))
        await until(lambda: index.blocks == {*held, NAMES[30]} - {*NAMES[12:14]}, what="later changes")
