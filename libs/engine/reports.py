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
    """Phase PREFILL is done, and the blocks are held under `SequenceOutput.handle`."""
    HANDED_OVER = "moved"
    """All blocks are held under `SequenceOutput.handle` for the worker on which the sequence continues."""
    KV_LOST = "kv_lost"
    """The blocks could not be fetched completely from their source."""
    FAILED = "failed"
    """This engine cannot continue the sequence; `SequenceOutput.detail` gives the reason."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a sampled token, and those of the most likely tokens in descending order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prompt: "tuple[Logprob, ...]" = ()
    """The logprobs of the prompt's second to last token, if requested, on the sequence's first output."""


@dataclass(slots=True)
class SequenceOutput:
    # Treat as immutable: a frozen dataclass would make the creation of one per token five times as expensive.

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
    """True if the first block was just requested, which fixes the decode worker."""
    pooled: bytes = b""
    """The prompt's vector as packed little-endian float32, not normalised; with `finish` of a pooled sequence."""
    streamed_handle: KvHandle | None = None
    """Handle of a prompt whose computation has begun. Each block can be pulled as soon as it is full."""

    @property
    def only_tokens(self) -> bool:
        """True if the output carries tokens and no other event."""
        return self.finish is None and self.streamed_handle is None and not self.pulling


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of one step. Times are Unix nanoseconds around the model call."""

    start_unix_ns: int
    end_unix_ns: int
    """The end of the step; 0 if it was announced and still runs."""
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    decode_sequences: int
    decode_kv_tokens: int
    waiting: int
    waiting_prefill_tokens: int
    encoded_images: int = 0
    """The images that the step encoded. Such a step computes nothing else."""
    prefill_squared_tokens: int = 0
    """The sum, over chunks, of the increase that each caused in the square of its prompt's length (libs/perfmodel)."""


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
    """Prompt tokens that this engine computes because their KV did not arrive: 0 or 1."""
    shared: bool = False
    """True if the blocks were copied from the sender's memory on the same host rather than sent."""
    ready_ns: int = 0
    """The part of the time from start to end in which ready KV was in transit; 0 if unknown. In the rest, the sender
    was still computing the prompt.
    """
    named: bool = False
    """True if the blocks had a gateway's name. The start is then when the first were ready, if that is known."""

    @property
    def wait_unknown(self) -> bool:
        """Return whether the transfer's time includes a wait for the prompt that an older sender did not measure."""
        return self.named and not self.ready_ns

    def link_ns(self, chunk_tokens: int) -> int:
        """Return the time that the link took; 0 if the transfer does not show it."""
        if self.wait_unknown:
            return 0
        # The KV of a single step arrives at once, before the receiver is notified.
        if self.ready_ns and self.prompt_tokens > chunk_tokens:
            return self.ready_ns
        whole_ns = self.end_unix_ns - self.start_unix_ns
        return 0 if awaited_prompt(whole_ns, self.ready_ns) else whole_ns


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Chained hashes of the blocks that became reusable here, and of those evicted."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Everything since the last event: one event per step, and one for everything between two steps."""

    outputs: tuple[SequenceOutput, ...] = ()
    step: StepReport | None = None
    kv_waits: tuple[tuple[int, int], ...] = ()
    """Ended (start, end) in Unix ns without a step in which some awaited KV was ready at its source."""
    kv_transfers: tuple[KvTransferReport, ...] = ()
    blocks: BlockEvents = BlockEvents()
    starved: tuple[tuple[int, int], ...] = ()
    """Ended (start, end) in Unix ns in which the sources had computed none of the awaited KV. Not in `kv_waits`."""
    dummy_steps: tuple[tuple[int, int], ...] = ()
    """Ended steps (start, end) in Unix ns that computed no sequence of this engine, since another data-parallel rank
    had work. They are not in any `step`, and may be reported some tenths of a second late.
    """


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Queue depths now, and counters since the start."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    """Sequences that await KV, or the token sampled after it."""
    free_kv_blocks: int
    kv_wait_since_unix_ns: int = 0
    """The start of the KV wait in progress; 0 if there is none."""
    reported_to_unix_ns: int = 0
    """The time in Unix ns up to which telemetry covers this engine; 0 means now.

    Every step and ended KV wait that starts earlier has already been read from `events`. A running step counts as
    read once it was announced.
    """
    preemptions: int = 0
    """The number of times since the start that a sequence lost its blocks to older ones."""
    recomputed_tokens: int = 0
    """The tokens computed again since the start because of preemption."""
    pool_faults: int = 0
    """1 if the block pool's reference counts were found wrong, as in `EngineIntegrity`."""
    starved_since_unix_ns: int = 0
    """The start of the starvation in progress (see `EngineEvent.starved`); 0 if there is none."""
    awaiting_ready_kv: int = 0
    """Sequences in `awaiting_kv` with at least one block that is ready at the source but has not arrived."""
    ready_kv_since_unix_ns: int = 0
    """The time since which the oldest of them has waited; 0 if there are none."""
    images_used: int = 0
    """Images since the start whose embeddings went into a prompt."""
    images_encoded: int = 0
    """Images encoded since the start. The embeddings of the others were cached."""
    image_encode_ns: int = 0
    """The time since the start in steps that encoded images."""
    image_cache_bytes: int = 0
    """The bytes of embeddings that are kept."""
    waiting_encode_ns: int = 0
    """The time that encoding the images of waiting prompts will take; 0 before any image was encoded."""
    waiting_prefill_squares: int = 0
    """The quadratic counterpart of `waiting_prefill_tokens`: the sum of each prompt's length squared less the square
    of its computed length.
    """


@dataclass(frozen=True, slots=True)
class EngineIntegrity:
    """Counters that must be zero when nothing runs."""

    live_sequences: int
    referenced_blocks: int
    leased_handles: int
    pool_faults: int = 0
    """1 if the block pool's reference counts were found wrong, else 0.

    The engine stops on such a fault, since a block shared by mistake would mix the answers of two sequences.
    """


# The number of unread steps that stops the engine, since a dropped step would appear as idle time.
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
    """A queue in which each step stays a separate event, up to `MAX_UNREAD_STEPS`.

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
        """Close the queue. The consumer reads the remaining events, then gets `error` if there is one."""
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
