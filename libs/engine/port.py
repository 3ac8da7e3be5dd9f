"""The engine port: what a worker may ask of any engine, in the field's words. One contract suite runs over all engines.
How KV blocks go from one to the other is in libs/engine/kv_port.py.

A sequence is tokens of which the first `computed` have KV. Every step computes some tokens of some sequences; a
sequence whose last token was computed gets a new one sampled. Prompt chunks, decodes and resumed sequences are the
same thing.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.engine.kv_port import KvExport, KvFetcher, KvHandle
from libs.engine.reports import EngineEvent, EngineIntegrity, EngineLoad
from libs.perfmodel.kv_shape import KvShape
from libs.perfmodel.utilisation import Compute
from libs.policy.step_time import StepTimeModel


class EnginePhase(Enum):
    """What is asked for a sequence."""

    PREFILL = "prefill"
    """Compute the prompt, sample the first token where the engine's capabilities say so, keep the blocks."""
    DECODE = "decode"
    """Fetch the blocks of `EngineRequest.kv`, then go on to the end."""
    BOTH = "both"
    """From the prompt to the end, here."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. `kv_layout` is equal where two engines can exchange blocks."""

    block_size_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    """What a further block of tokens adds to a long sequence, one copy of it."""
    max_context_tokens: int
    max_sequences: int
    kv_layout: str
    vocab_size: int = 0
    """Token ids in a request are below it; 0: any id is good. `submit` refuses others, since one would fail a step."""
    hands_over_running_kv: bool = False
    """`Engine.hand_over` works."""
    streams_kv: bool = False
    scores_prompts: bool = False
    """`SamplingParams.prompt_logprobs` is served."""
    seeds_by_position: bool = True
    """A seeded sequence that goes on elsewhere draws what it would have drawn here; else only whole ones repeat."""
    kv_once: bool = False
    """A handle's blocks are held until they are read once; a later reader gets no error, but whatever has taken their
    place. Otherwise they can be fetched again, or fail with KvLost."""
    first_token_from: Literal["prefill", "decode"] = "prefill"
    """Where the decode side samples it, a computed prompt brings no token, and its last token is computed again there.
    """
    kv_nonce: bytes = b""
    """What is written in the pool's file, where other processes of the host can map it; empty: they cannot."""
    chunk_tokens: int = 0
    """Prompt tokens that one step computes at most; 0: unknown."""
    compute: Compute | None = None
    """What utilisation is reckoned from; None: unknown."""
    kv_shape: KvShape | None = None
    """What layers of several kinds keep of a sequence; None: all keep all of it, `kv_block_bytes` a block."""
    sleeps: bool = False
    """`Engine.sleep` and `wake` work."""
    drops_weights: bool = False
    """`Engine.sleep` works without keeping the weights: waking reads them again, and spares the rest of a start."""
    loads_adapters: bool = False
    """Adapters that the engine has not been started with are read when a sequence comes with their folder."""
    variant: str = ""
    """What beside model and device decides how long a step takes, in a few words: types, width, threads, versions."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV that a sequence of `tokens` takes, in whole blocks."""
        if self.kv_shape is not None:
            return self.kv_shape.sequence_bytes(tokens)
        return -(-tokens // self.block_size_tokens) * self.kv_block_bytes

    def knows(self, token_ids: tuple[int, ...]) -> bool:
        """Whether all of these are tokens of the model's vocabulary, as far as its size is known."""
        return not self.vocab_size or all(0 <= token_id < self.vocab_size for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Noise is a function of `seed` and the token's position alone, so a sequence can move, where
    `Capabilities.seeds_by_position` says so."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    guide: str = ""
    """Grammar that the generated tokens keep to (libs/engine/guides.py); empty: none."""
    min_tokens: int = 0
    """Generated tokens before one that ends the sequence may come."""
    prompt_logprobs: bool = False
    """Whether the first token's logprob carries those of the prompt; needs `logprobs`."""
    prompt_top_logprobs: int = 0

    @property
    def follows_from_tokens(self) -> bool:
        """Whether the next token is the same when the ones before it were all given as a prompt: no noise, and no
        penalty that counts generated tokens alone."""
        return not (self.temperature or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence for the engine."""

    sequence_id: int
    """Unique in this engine while the sequence lives."""
    request_id: str
    phase: EnginePhase
    token_ids: NDArray[np.int32]
    """[tokens] 1D int32: the prompt, then tokens already generated elsewhere."""
    prompt_tokens: int
    max_output_tokens: int
    """Counted from the end of the prompt."""
    sampling: SamplingParams
    chain_root: bytes = b""
    """Start of the block hash chain; empty switches prefix reuse off for the sequence."""
    kv: KvHandle | None = None
    tpot_target_ns: int = 0
    """Time per output token that is wanted after the first; 0: none."""
    first_token_due_ns: int = 0
    """When its first token is wanted, Unix nanoseconds; 0: nobody has said."""
    adapter: str = ""
    """Name of the adapter that the model computes it with; empty: none."""
    adapter_source: str = ""
    """Its folder, where the engine has not been started with it."""
    yields: bool = False
    """Nobody waits for it in person: its prompt is computed while no other one waits."""
    kind: str = ""
    """Tenant and class, by whose answers its length is expected; empty: by everybody's."""


Progress = Callable[[str, float], None]
"""Called with a stage ("loading weights") and the share of it that is done, 0..1."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine needs to know of its worker to make handles."""

    worker_id: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of a device, with what others use of it; of several, of the one with least left."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """What all processes together hold."""
        return self.total_bytes - self.free_bytes


class Engine(Protocol):
    """One engine in one worker. All methods are called on the event loop's thread."""

    @property
    def name(self) -> str:
        """ "torch", "sim" or "vllm"."""
        ...

    @property
    def device(self) -> str:
        """What it computes on, e.g. "cpu" or "cuda:NVIDIA H200"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Valid after `start`."""
        ...

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Load the model. Raises StartupError with one line that says what to do."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give the device back and keep the weights in host memory, where capabilities say so; or drop them. What still
        runs is aborted, as by `close`; `events` end. Idempotent. Raises SleepFailed where the engine is good for
        nothing but `close` after that."""
        ...

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start again from host memory: the KV pool is empty, and handles from before are void. Raises StartupError."""
        ...

    async def device_memory(self) -> DeviceMemory | None:
        """Of the device it computes on, awake or asleep; None: unknown, or nothing that sleeps stays there."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Take a sequence. Raises InvalidRequest when it can never run here, QueueFull when the bound is reached."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence soon, with FinishReason.ABORTED and its blocks freed; unknown ids are ignored."""
        ...

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        """The prompt of a streamed sequence is computed, and these tokens were sampled there: with its KV it goes on.

        Other ids are ignored. Raises InvalidRequest for tokens that no sequence goes on from.
        """
        ...

    def hand_over(self, sequence_id: int) -> None:
        """End a sequence at its next step boundary with its KV held for another worker, by FinishReason.HANDED_OVER.

        One that does not decode yet goes with its first token; one that ends by then ends as it would. Unknown ids and
        phase PREFILL are ignored.
        """
        ...

    def set_prefill_budget(self, tokens: int) -> None:
        """Prompt tokens that one step may compute beside decodes; takes effect with the next step."""
        ...

    def set_prefill_chunk(self, tokens: int) -> None:
        """Prompt tokens that one step computes at most, whatever the budget; takes effect with the next step."""
        ...

    def set_step_time(self, model: StepTimeModel) -> None:
        """How long steps take, as known by now: prompt chunks and newcomers are held to running TPOT targets by it."""
        ...

    async def measure_prefill(self, tokens: int) -> int | None:
        """Nanoseconds of one step that computes prompts of `tokens` tokens in all, run between other steps.

        None where there is no room for them now, or where sequences that decode would wait for longer than their TPOT
        targets allow, as for any prompt. Raises QueueFull while another measurement waits.
        """
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """The engine's only output; one consumer. Raises when the engine died."""
        ...

    def export(
        self, opaque: bytes, kv_layout: str, from_block: int, *, news: Callable[[], None], in_place: bool = False
    ) -> KvExport:
        """The blocks behind a handle, those of a streamed one as they become full.

        `news` is called after a `take` that gave nothing, once another may give more. `in_place`: the receiver reads
        them in the pool's file, so chunks may be larger than what a message carries. Raises KvLost for an unknown
        handle, KvMismatch for another layout.
        """
        ...

    def release(self, opaque: bytes) -> None:
        """The receiver has the blocks; unknown handles are ignored."""
        ...

    def abandon(self, opaque: bytes) -> None:
        """Whoever was to have the blocks pulled is gone: unless a receiver reads them, or comes soon, they are released
        well before their lease ends. Unknown handles are ignored."""
        ...

    def load(self) -> EngineLoad:
        """Depths now."""
        ...

    def integrity(self) -> EngineIntegrity:
        """Counters that must be zero when nothing runs."""
        ...

    async def close(self) -> None:
        """Abort what runs and free the device. Idempotent."""
        ...
