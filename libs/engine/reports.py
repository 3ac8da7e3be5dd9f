"""The reports of an engine: tokens, ends of sequences, steps, KV transfers, reusable blocks and depths.

Events reach one consumer in order, through a bounded queue that drops none.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from libs.engine.kv_blocks import BlockChanges, BlockPool, KvWait
from libs.engine.kv_port import KvHandle
from libs.policy.kv_links import awaited_prompt


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    PREFILLED = "prefilled"
    """The prompt is computed. `SequenceOutput.handle` refers to its blocks."""
    HANDED_OVER = "moved"
    """The sequence continues on another worker. `SequenceOutput.handle` refers to all its blocks."""
    KV_LOST = "kv_lost"
    """The blocks could not be fetched completely from their source."""
    FAILED = "failed"
    """This engine cannot continue the sequence. `SequenceOutput.detail` gives the reason."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a sampled token, and those of the most likely tokens in descending order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prompt: "tuple[Logprob, ...]" = ()
    """The logprobs of the prompt's second to last token, if requested; only on the sequence's first output."""


@dataclass(slots=True)
class SequenceOutput:
    # Treat as immutable. Creating a frozen dataclass for every token would take five times as long.

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    """One logprob for each of `token_ids` if requested, else none."""
    finish: FinishReason | None = None
    handle: KvHandle | None = None
    detail: str = ""
    cached_tokens: int = 0
    """The number of prompt tokens whose KV was cached here; set with `finish`."""
    computed_prompt_tokens: int = 0
    """The number of prompt tokens computed here; set with `finish`."""
    kv_bytes_received: int = 0
    pulling: bool = False
    """True if the first block was just requested, after which the decode worker no longer changes."""
    pooled: bytes = b""
    """The prompt's vector as packed little-endian float32, not normalised; with `finish` of a pooled sequence."""
    streamed_handle: KvHandle | None = None
    """The handle of a prompt whose computation has begun. Each block can be pulled as soon as it is full."""

    @property
    def only_tokens(self) -> bool:
        """True if the output has tokens and nothing else."""
        return self.finish is None and self.streamed_handle is None and not self.pulling


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of one step. The times are Unix nanoseconds around the model call."""

    start_unix_ns: int
    end_unix_ns: int
    """The end of the step; 0 in the announcement of a running step."""
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    decode_sequences: int
    decode_kv_tokens: int
    waiting: int
    waiting_prefill_tokens: int
    encoded_images: int = 0
    """The number of images that the step encoded. Such a step computes nothing else."""
    prefill_squared_tokens: int = 0
    """The sum over chunks of the increase in the square of the computed prompt length (libs/perfmodel)."""


@dataclass(frozen=True, slots=True)
class KvTransferReport:
    """The blocks that this engine received for one sequence."""

    request_id: str
    from_worker_id: str
    blocks: int
    data_bytes: int
    start_unix_ns: int
    end_unix_ns: int
    prompt_tokens: int
    prompt_tokens_computed: int
    """The number of prompt tokens that this engine computes because their KV was not sent: 0 or 1."""
    shared: bool = False
    """True if the blocks were copied from the sender's memory on the same host rather than sent."""
    ready_ns: int = 0
    """The part of the transfer in which ready KV was in transit; 0 if unknown. In the rest, the sender was still
    computing the prompt.
    """
    named: bool = False
    """True if a gateway named the blocks. The transfer then starts when the first block is ready, if that time is
    known.
    """

    @property
    def wait_unknown(self) -> bool:
        """True if the transfer's time includes a wait for the prompt, because an older sender did not measure it."""
        return self.named and not self.ready_ns

    def link_ns(self, chunk_tokens: int) -> int:
        """Return the time that the link took; 0 if it is unknown."""
        if self.wait_unknown:
            return 0
        # The KV of a prompt computed in one step arrives before the receiver is notified.
        if self.ready_ns and self.prompt_tokens > chunk_tokens:
            return self.ready_ns
        whole_ns = self.end_unix_ns - self.start_unix_ns
        return 0 if awaited_prompt(whole_ns, self.ready_ns) else whole_ns


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """The chained hashes of the blocks that became reusable here, and of those evicted."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """All reports since the last event. There is one event per step, and one for everything between two steps."""

    outputs: tuple[SequenceOutput, ...] = ()
    step: StepReport | None = None
    kv_waits: tuple[tuple[int, int], ...] = ()
    """The ended intervals (start, end) of KV wait in Unix nanoseconds. In a KV wait no step runs, and ready KV is in
    transit.
    """
    kv_transfers: tuple[KvTransferReport, ...] = ()
    blocks: BlockEvents = BlockEvents()
    starved: tuple[tuple[int, int], ...] = ()
    """The ended intervals (start, end) of starvation in Unix nanoseconds. In starvation no step runs, and all awaited
    KV is still to be computed.
    """
    dummy_steps: tuple[tuple[int, int], ...] = ()
    """The ended steps (start, end), in Unix nanoseconds, that computed no sequence because only another data-parallel
    rank had work. They are in no `step`, and may be reported some tenths of a second late.
    """


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current queue depths, and counters since the start."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    """The number of sequences that wait for KV, or for the token sampled after it."""
    free_kv_blocks: int
    kv_wait_since_unix_ns: int = 0
    """The start of the current KV wait; 0 if there is none."""
    reported_to_unix_ns: int = 0
    """The Unix nanoseconds up to which the events read so far cover this engine; 0 means now.

    Every step and KV wait that started earlier has been read from `events`. A running step counts as read once it has
    been announced.
    """
    preemptions: int = 0
    """The number of times since the start that a sequence lost its blocks to an older one."""
    recomputed_tokens: int = 0
    """The number of tokens computed again since the start, because of preemption."""
    pool_faults: int = 0
    """1 if a mismatch of the block pool's reference counts was found, as in `EngineIntegrity`."""
    starved_since_unix_ns: int = 0
    """The start of the current starvation (see `EngineEvent.starved`); 0 if there is none."""
    awaiting_ready_kv: int = 0
    """The number of sequences in `awaiting_kv` with a block that is ready at the source and has not arrived."""
    ready_kv_since_unix_ns: int = 0
    """The earliest time since which one of them has had such a block, in Unix nanoseconds; 0 if there are none."""
    images_used: int = 0
    """The number of images since the start whose embeddings became part of a prompt."""
    images_encoded: int = 0
    """The number of images encoded since the start. The other used images were cached."""
    image_encode_ns: int = 0
    """The total time since the start of steps that encoded images."""
    image_cache_bytes: int = 0
    """The bytes of cached embeddings."""
    waiting_encode_ns: int = 0
    """The predicted time to encode the images of waiting prompts; 0 before any image was encoded."""
    waiting_prefill_squares: int = 0
    """The quadratic counterpart of `waiting_prefill_tokens`: the sum of each prompt's squared length less its squared
    computed length.
    """


@dataclass(frozen=True, slots=True)
class EngineIntegrity:
    """The counters that must be zero when nothing runs."""

    live_sequences: int
    referenced_blocks: int
    leased_handles: int
    pool_faults: int = 0
    """1 if a mismatch of the block pool's reference counts was found, else 0.

    The engine then stops, since a block shared by mistake would mix the answers of two sequences.
    """


# At this number of unread steps the engine pauses. A dropped step would appear as idle time.
MAX_UNREAD_STEPS = 256
_NO_BLOCKS: Final = BlockEvents()


class EngineNews:
    """The outputs and KV transfers since the engine's last event."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.transfers: list[KvTransferReport] = []

    def take(self, step: StepReport | None, kv_wait: KvWait, pool: BlockPool) -> EngineEvent | None:
        """Return everything since the last call as one event with `step`; None if there is nothing.

        The event includes the waits that ended in `kv_wait` and the changed hashes of `pool`.
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
    """A queue of events in which each step remains a separate event, up to `MAX_UNREAD_STEPS`.

    An event without a step is merged into the last unread one.
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
        """Append an event. Drop it after `end`."""
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
        """Close the queue. The consumer reads the remaining events, then gets `error` if there is one."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def room(self) -> None:
        """Wait until the queue has room for another step."""
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
