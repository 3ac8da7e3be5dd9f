"""The engine's output: ordered events for one consumer, in a bounded queue that drops none."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from libs.engine.kv_blocks import BlockChanges, BlockPool, KvWait
from libs.engine.reports import BlockEvents, EngineEvent, KvTransferReport, SequenceOutput, StepReport

# A consumer this far behind stops the engine, since a dropped step would appear as idle time.
MAX_UNREAD_STEPS = 256
_NO_BLOCKS: Final = BlockEvents()


class EngineNews:
    """Outputs and KV transfers since the engine's last event."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.transfers: list[KvTransferReport] = []

    def take(self, step: StepReport | None, kv_wait: KvWait, pool: BlockPool) -> EngineEvent | None:
        """Return everything as one event with the step that produced it; None if there is nothing.

        Ended waits are taken from `kv_wait`, and changes of reusable blocks from `pool`.
        """
        if not (step or self.outputs or self.transfers or kv_wait.ended or kv_wait.starved_ended or pool.changes):
            return None
        blocks = _NO_BLOCKS
        if pool.changes:
            changes = pool.take_changes()
            blocks = BlockEvents(tuple(changes.stored), tuple(changes.removed))
        waits, starved = kv_wait.take_ended(), kv_wait.take_starved()
        event = EngineEvent(tuple(self.outputs), step, waits, tuple(self.transfers), blocks, starved)
        self.outputs, self.transfers = [], []
        return event


class EventQueue:
    """A queue in which each step stays an event of its own, up to `MAX_UNREAD_STEPS`.

    Events from between steps are merged into the last unread event.
    """

    def __init__(self) -> None:
        self._unread: deque[EngineEvent] = deque()
        self._unread_steps = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, event: EngineEvent) -> None:
        """Append an event. After `end` it is dropped."""
        if self._ended:
            return
        if event.step is None and self._unread:
            self._unread[-1] = merge(self._unread[-1], event)
        else:
            self._unread.append(event)
            self._unread_steps += event.step is not None
        if self._unread_steps >= MAX_UNREAD_STEPS:
            self._room.clear()
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """Close the queue. The consumer reads what is left, then gets `error` if there is one."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def room(self) -> None:
        """Wait until the consumer has caught up enough for another step."""
        await self._room.wait()

    async def get(self) -> EngineEvent | None:
        """Return the next event, or None at the end. A cancelled call loses nothing.

        Raise the error with which the queue was closed.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        event = self._unread.popleft()
        self._unread_steps -= event.step is not None
        if self._unread_steps < MAX_UNREAD_STEPS:
            self._room.set()
        return event

    def oldest_start_ns(self) -> int:
        """Return the earliest start of an unread step or KV wait; 0 if there is none."""
        return min((start for event in self._unread for start in _starts(event)), default=0)


def merge(first: EngineEvent, later: EngineEvent) -> EngineEvent:
    """Merge two events into one. `later` must have no step."""
    changes = BlockChanges(dict.fromkeys(first.blocks.stored), dict.fromkeys(first.blocks.removed))
    for content in later.blocks.stored:
        changes.store(content)
    for content in later.blocks.removed:
        changes.remove(content)
    return replace(
        first,
        outputs=first.outputs + later.outputs,
        kv_waits=first.kv_waits + later.kv_waits,
        kv_transfers=first.kv_transfers + later.kv_transfers,
        blocks=BlockEvents(tuple(changes.stored), tuple(changes.removed)),
        starved=first.starved + later.starved,
        dummy_steps=first.dummy_steps + later.dummy_steps,
    )


def _starts(event: EngineEvent) -> Iterator[int]:
    if event.step is not None:
        yield event.step.start_unix_ns
    for start, _end in event.kv_waits + event.starved:
        yield start
