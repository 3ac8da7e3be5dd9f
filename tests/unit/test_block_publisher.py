"""What a worker holds, told to the KV index."""

import asyncio
from collections.abc import Sequence

from libs.engine.port import BlockEvents, EngineEvent
from libs.testing.wait import until
from libs.testing.worker import RecordingKvIndex
from libs.worker.block_publisher import BlockPublisher


class CountingIndex(RecordingKvIndex):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def publish(self, model: str, worker_id: str, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.calls += 1
        await super().publish(model, worker_id, stored=stored, removed=removed)


async def test_one_change_is_told_at_once_and_those_behind_it_share_a_call() -> None:
    index = CountingIndex()
    publisher = BlockPublisher(index, "model", "prefill-0", lease_ms=10_000)
    running = asyncio.create_task(publisher.run())
    names = [bytes([number]) for number in range(50)]
    publisher.on_event(EngineEvent(blocks=BlockEvents(stored=(names[0],))))
    await until(lambda: index.blocks == {names[0]}, what="the first block in the index")
    for name in names[1:]:
        publisher.on_event(EngineEvent(blocks=BlockEvents(stored=(name,))))
        await asyncio.sleep(0)
    publisher.on_event(EngineEvent(blocks=BlockEvents(removed=(names[7],))))
    await until(lambda: index.blocks == {*names} - {names[7]}, what="all changes in the index")
    assert index.calls <= 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
