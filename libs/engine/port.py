"""The engine port: the operations a worker may request of any engine.

One contract suite runs over all engines. The ports for moving KV blocks between engines are in
libs/engine/kv_port.py.

A sequence is a list of tokens, of which the first `computed` have KV. Every step computes some tokens of some
sequences, and samples a new token for each sequence whose last token it computed. Prompt chunks, decodes and
resumed sequences are therefore handled alike.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.contracts.hashing import ImageSpan
from libs.engine.kv_port import KvExport, KvFetcher, KvHandle
from libs.engine.reports import EngineEvent, EngineIntegrity, EngineLoad
from libs.perfmodel.utilisation import Compute, KvShape
from libs.policy.step_time import StepTimeModel


class EnginePhase(Enum):
    """The part of a request that an engine serves."""

    PREFILL = "prefill"
    """Compute the prompt and hold its blocks for a decode worker. The first token is sampled here if
    `Capabilities.first_token_from` is "prefill".
    """
    DECODE = "decode"
    """Fetch the blocks of `EngineRequest.kv`, then generate to the end."""
    BOTH = "both"
    """Compute the prompt and generate to the end on this engine."""


class Pooling(Enum):
    """The vector that a prompt's last hidden states become."""

    LAST = "last"
    """The last token's vector."""
    MEAN = "mean"
    """The mean of all tokens' vectors. All tokens are computed, so no prefix is reused."""
    CLS = "cls"
    """The vector of an encoder's first token."""
    SCORE = "score"
    """The one output of a cross-encoder's head."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features and limits of an engine. Two engines can exchange blocks if their `kv_layout` is equal."""

    block_size_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    """The bytes that one more block of tokens adds to a long sequence, counted once however many ranks hold a copy."""
    max_context_tokens: int
    max_sequences: int
    kv_layout: str
    vocab_size: int = 0
    """Exclusive upper bound of token ids; 0 if unknown. `submit` refuses others: a single one would fail a whole
    step.
    """
    hands_over_running_kv: bool = False
    """True if `Engine.hand_over` is supported for decoding sequences."""
    streams_kv: bool = False
    named_kv: bool = False
    """True if the engine supports `EngineRequest.kv_name`, and handles that are `named`."""
    scores_prompts: bool = False
    """True if the engine computes `SamplingParams.prompt_logprobs`; if not, `submit` refuses them."""
    pools: frozenset[Pooling] = frozenset()
    """The values of `EngineRequest.pooling` that the engine computes; `submit` refuses others."""
    generates: bool = True
    """True if the engine generates tokens; otherwise `submit` refuses sequences without `EngineRequest.pooling`."""
    whole_prompts: bool = False
    """True if a prompt is computed in one step, since its tokens attend to those that follow."""
    seeds_by_position: bool = True
    """True if a seeded sequence that moves draws the same tokens as it would have drawn here. Otherwise, seeds repeat
    only sequences that run in one place.
    """
    kv_once: bool = False
    """True if the blocks of a handle can be read only once. A later reader then gets no error, but arbitrary other
    content. If False, blocks can be fetched again, or the fetch fails with KvLost.
    """
    first_token_from: Literal["prefill", "decode"] = "prefill"
    """The side that samples the first token. With "decode", a computed prompt yields no token, and the decode side
    recomputes the prompt's last token.
    """
    kv_nonce: bytes = b""
    """The nonce in the pool's file, which identifies it to processes on the host; empty if they cannot map it."""
    chunk_tokens: int = 0
    """The upper bound of the prompt tokens in one step; 0 if unknown."""
    compute: Compute | None = None
    """Inputs for computing utilisation; None if unknown."""
    kv_shape: KvShape | None = None
    """The KV that layers of different kinds keep of a sequence. None if all layers keep the whole sequence, at
    `kv_block_bytes` a block.
    """
    sleeps: bool = False
    """True if `Engine.sleep` and `Engine.wake` can be called."""
    drops_weights: bool = False
    """True if `Engine.sleep` can drop the weights. Waking then reads them again, but skips the rest of a start."""
    loads_adapters: bool = False
    """True if an adapter that was not given at start is loaded when a sequence names its folder."""
    images: bool = False
    """True if prompts may contain images; if not, `submit` refuses them."""
    variant: str = ""
    """A short text with everything other than model and device that affects step times: types, width, threads,
    versions.
    """

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of KV of a sequence of `tokens` tokens, rounded up to whole blocks."""
        if self.kv_shape is not None:
            return self.kv_shape.sequence_bytes(tokens)
        return -(-tokens // self.block_size_tokens) * self.kv_block_bytes

    def knows(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether all ids are in the model's vocabulary; true if its size is unknown."""
        return not self.vocab_size or all(0 <= token_id < self.vocab_size for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for drawing tokens.

    If `Capabilities.seeds_by_position` is set, noise depends only on `seed` and the token's position. A sequence can
    then move without changing the tokens that it draws.
    """

    temperature: float = 1.0
    """The softmax temperature; 0 selects greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of most likely tokens to draw from; 0 disables the limit."""
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
    """Grammar that constrains the generated tokens (libs/engine/guides.py); empty for none."""
    min_tokens: int = 0
    """The tokens to generate before one that ends the sequence is allowed."""
    prompt_logprobs: bool = False
    """True if the first token's logprob carries those of the prompt; requires `logprobs`."""
    prompt_top_logprobs: int = 0

    @property
    def follows_from_tokens(self) -> bool:
        """True if a sequence continues identically if its tokens are resubmitted as a prompt.

        This holds without noise and without penalties that only count generated tokens.
        """
        return not (self.temperature or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, with its file if this engine computes the prompt."""

    span: ImageSpan
    data: bytes = b""
    """The image's file. It is empty in phase DECODE, which receives the KV and never encodes."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    sequence_id: int
    """Unique among the live sequences of this engine."""
    request_id: str
    phase: EnginePhase
    token_ids: NDArray[np.int32]
    """[tokens] 1D int32: the prompt, followed by tokens already generated elsewhere."""
    prompt_tokens: int
    max_output_tokens: int
    """The upper bound of generated tokens, counted from the end of the prompt."""
    sampling: SamplingParams
    chain_root: bytes = b""
    """Root of the block hash chain; empty disables prefix reuse for the sequence."""
    kv: KvHandle | None = None
    kv_name: bytes = b""
    """The handle under which the blocks of a prompt are offered, from before it begins; empty to have one made."""
    tpot_target_ns: int = 0
    """Target time per output token after the first; 0 for none."""
    first_token_due_ns: int = 0
    """Deadline of the first token in Unix nanoseconds; 0 for none."""
    adapter: str = ""
    """The name of the adapter to apply to the model; empty for none."""
    adapter_source: str = ""
    """The folder of the adapter, if the engine was not started with it."""
    yields: bool = False
    """True if the request is background work, such as a batch line.

    Its prompt is computed only while no other prompt waits.
    """
    pooling: Pooling | None = None
    """The method that turns the prompt into one vector. The sequence then ends without a token or a handle. None
    generates tokens. `chain_root` must be empty unless it is `Pooling.LAST`.
    """
    second_from: int = 0
    """The position of a pair's second text in the prompt, for models that distinguish the two; 0 for none."""
    images: tuple[PromptImage, ...] = ()
    """The prompt's images, in order."""
    kind: str = ""
    """Tenant and class whose past answers predict this sequence's length. If empty, the answers of all sequences are
    used.
    """


Progress = Callable[[str, float], None]
"""A callback for a stage ("loading weights") and the fraction of it that is done, 0..1."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The worker's identity, which an engine writes into its KV handles."""

    worker_id: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, counting all processes. For several devices, the one with the least free memory."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class Engine(Protocol):
    """An engine inside a worker. All methods are called on the event loop's thread."""

    @property
    def name(self) -> str:
        """One of "torch", "sim" and "vllm", as named in settings."""
        ...

    @property
    def device(self) -> str:
        """The device that computes, e.g. "cpu" or "cuda:NVIDIA H200"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Features and limits, valid after `start` has returned."""
        ...

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Load the model. Raise StartupError, whose single line says what to do."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Release the device, and either keep the weights in host memory or drop them, as capabilities allow.

        Running sequences are aborted as by `close`, and `events` ends. Idempotent. Raise SleepFailed if only
        `close` can be called afterwards.
        """
        ...

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start again from host memory. Raise StartupError if that fails.

        The KV pool is empty afterwards, and handles from before are void.
        """
        ...

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the device, awake or asleep; None if unknown or if nothing is left there."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raise InvalidRequest if it can never run here, QueueFull if the queue is at its bound."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence soon with FinishReason.ABORTED and free its blocks. Unknown ids are ignored."""
        ...

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        """Continue a streamed sequence, whose prompt is now computed elsewhere, from the tokens sampled there.

        Other ids are ignored. Raise InvalidRequest for tokens from which the sequence cannot continue.
        """
        ...

    def hand_over(self, sequence_id: int) -> None:
        """End a sequence at its next step boundary with FinishReason.HANDED_OVER, and hold its KV for another worker.

        A sequence that does not decode yet leaves with its first token. One that ends at that step ends as usual.
        Unknown ids and phase PREFILL are ignored.
        """
        ...

    def set_prefill_budget(self, tokens: int) -> None:
        """Set the number of prompt tokens that a step may compute beside decodes, from the next step on."""
        ...

    def set_prefill_chunk(self, tokens: int) -> None:
        """Set the upper bound of prompt tokens per step, regardless of the budget, from the next step on."""
        ...

    def set_step_time(self, model: StepTimeModel) -> None:
        """Set the model of step durations, by which prompt chunks and new decodes are limited to meet running TPOT
        targets.
        """
        ...

    async def measure_prefill(self, tokens: int) -> int | None:
        """Return the nanoseconds of one step that computes prompts of `tokens` tokens in total, run between other
        steps.

        Return None if there is no room, or if decoding sequences would then miss their TPOT targets. Raise
        QueueFull while another measurement waits.
        """
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """Iterate over the engine's only output, for one consumer. Raise the error that ended the engine."""
        ...

    def export(
        self,
        opaque: bytes,
        kv_layout: str,
        from_block: int,
        *,
        news: Callable[[], None],
        in_place: bool = False,
        named: bool = False,
    ) -> KvExport:
        """Open the blocks behind a handle for reading; those of a streamed prompt follow as they fill.

        After a `take` that returned nothing, `news` is called once another may return more. With `in_place` the
        receiver reads the pool's file, so chunks may be larger than a message. Raise KvLost for an unknown handle,
        KvMismatch for another layout. A `named` handle may be unknown at first, while its prompt is still on its way.
        """
        ...

    def release(self, opaque: bytes) -> None:
        """Free the blocks behind a handle once the receiver has them. Unknown handles are ignored."""
        ...

    def abandon(self, opaque: bytes) -> None:
        """Shorten the lease of a handle whose gateway is gone.

        The blocks are freed well before the lease would end, unless a receiver reads them or arrives soon. Unknown
        handles are ignored.
        """
        ...

    def load(self) -> EngineLoad:
        """Return the current queue depths and counters."""
        ...

    def integrity(self) -> EngineIntegrity:
        """Return the counters that must be zero when nothing runs."""
        ...

    async def close(self) -> None:
        """Abort running sequences and free the device. Idempotent."""
        ...
