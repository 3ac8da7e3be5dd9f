"""What an engine reports: tokens, ends of sequences, steps, KV transfers, reusable blocks, depths."""

from dataclasses import dataclass
from enum import Enum

from libs.engine.kv_port import KvHandle


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    PREFILLED = "prefilled"
    """Phase PREFILL is done: blocks are held under `SequenceOutput.handle`."""
    HANDED_OVER = "moved"
    """All its blocks are held under `SequenceOutput.handle`, for a worker where it goes on."""
    KV_LOST = "kv_lost"
    """The blocks could not be fetched whole."""
    FAILED = "failed"
    """This engine cannot go on with the sequence; `SequenceOutput.detail` says why."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one sampled token, with the most likely tokens beside it, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prompt: "tuple[Logprob, ...]" = ()
    """With a sequence's first token, where asked for: of its prompt's second to last token."""


@dataclass(slots=True)
class SequenceOutput:
    """What one step brought for one sequence. Not to be changed; frozen, making one for every token costs five times as
    much."""

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    """Aligned with `token_ids` where asked for."""
    finish: FinishReason | None = None
    handle: KvHandle | None = None
    detail: str = ""
    cached_tokens: int = 0
    """With `finish`: prompt tokens whose KV was found here."""
    computed_prompt_tokens: int = 0
    """With `finish`: prompt tokens computed here."""
    kv_bytes_received: int = 0
    pulling: bool = False
    """The first block was asked for: the decode worker is fixed from here on."""
    streamed_handle: KvHandle | None = None
    """Phase PREFILL has begun: its blocks can be pulled from now on, each once it is full."""

    @property
    def only_tokens(self) -> bool:
        """Whether its tokens say it all."""
        return self.finish is None and self.streamed_handle is None and not self.pulling


@dataclass(frozen=True, slots=True)
class StepReport:
    """Truth about one step, for telemetry. Times are Unix nanoseconds around the model call."""

    start_unix_ns: int
    end_unix_ns: int
    """0: announced, still running."""
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    decode_sequences: int
    decode_kv_tokens: int
    waiting: int
    waiting_prefill_tokens: int
    prefill_squared_tokens: int = 0
    """What the chunks added to the squares of their prompts' lengths (libs/perfmodel)."""


@dataclass(frozen=True, slots=True)
class KvTransferReport:
    """Blocks that this engine received for one sequence."""

    request_id: str
    from_worker_id: str
    blocks: int
    data_bytes: int
    start_unix_ns: int
    end_unix_ns: int
    prompt_tokens: int
    prompt_tokens_computed: int
    """Prompt tokens this engine has to compute because their KV did not come: 0 or 1."""
    shared: bool = False
    """Copied from the sender's memory on the same host; else the bytes were sent."""


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Chained hashes of blocks that became reusable here, and of those evicted."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Everything since the last event: one a step, and one when something happened between steps."""

    outputs: tuple[SequenceOutput, ...] = ()
    step: StepReport | None = None
    kv_waits: tuple[tuple[int, int], ...] = ()
    """Ended intervals (start, end) in Unix ns in which no step ran and at least one sequence awaited KV that was ready
    at its source."""
    kv_transfers: tuple[KvTransferReport, ...] = ()
    blocks: BlockEvents = BlockEvents()
    starved: tuple[tuple[int, int], ...] = ()
    """Likewise, with all KV that sequences awaited still to be computed at its source; no part of `kv_waits`."""
    dummy_steps: tuple[tuple[int, int], ...] = ()
    """Steps (start, end) in Unix ns, each once it has ended, that computed nothing of anybody's, since another rank of
    the data-parallel group had work. No `step` reports them, and they may be heard of up to some tenths of a second
    late."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Depths now."""

    running: int
    waiting: int
    waiting_prefill_tokens: int
    awaiting_kv: int
    """Sequences whose KV, or the token sampled after it, is on its way."""
    free_kv_blocks: int
    kv_wait_since_unix_ns: int = 0
    """Start of a KV wait that goes on; 0 when none does."""
    reported_to_unix_ns: int = 0
    """No step or ended KV wait that starts before this moment is still to come from `events`, whether it runs or its
    event lies unread; a running step counts as come once it was announced. 0: now. Telemetry covers time up to here."""
    preemptions: int = 0
    """How often, since the start, a sequence lost its blocks to older ones."""
    recomputed_tokens: int = 0
    """Tokens computed again, since the start, because of that."""
    pool_faults: int = 0
    """The same count as in `EngineIntegrity`."""
    starved_since_unix_ns: int = 0
    """Start of a starvation that goes on (see `EngineEvent.starved`); 0 when none does."""
    awaiting_ready_kv: int = 0
    """Those sequences of `awaiting_kv` of which a block is ready at its source and not here."""
    ready_kv_since_unix_ns: int = 0
    """Since when the longest awaited of them has been; 0 without any."""
    waiting_prefill_squares: int = 0
    """For `waiting_prefill_tokens`, each prompt's length squared less the square of what it has computed, summed."""


@dataclass(frozen=True, slots=True)
class EngineIntegrity:
    """What must be zero when nothing runs."""

    live_sequences: int
    referenced_blocks: int
    leased_handles: int
    pool_faults: int = 0
    """Whether the block pool's books were found wrong, 0 or 1: the engine dies of it, since a block that two sequences
    take for theirs would mix their answers."""
