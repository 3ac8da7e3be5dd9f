"""The engine port: the operations that a worker may request of any engine.

One contract suite runs over all engines. The ports for the KV that engines exchange are in libs/engine/kv_port.py.

A sequence is a list of tokens, of which the first `computed` have KV. Every step computes some tokens of some
sequences, and samples a new token for each sequence whose last token it computed. Prompt chunks, decodes and resumed
sequences are therefore handled alike.
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
    """Compute the prompt and hold its blocks for a decode worker. If `Capabilities.first_token_from` is "prefill", also
    sample the first token.
    """
    DECODE = "decode"
    """Fetch the blocks of `EngineRequest.kv`, then generate to the end."""
    BOTH = "both"
    """Compute the prompt and generate to the end on this engine."""


class Pooling(Enum):
    """The method that makes one vector of a prompt's last hidden states."""

    LAST = "last"
    """The last token's vector."""
    MEAN = "mean"
    """The mean of all tokens' vectors. All tokens are computed here, without reuse of a cached prefix."""
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
    """The bytes that a further block adds to a long sequence. Copies on several ranks are not counted."""
    max_context_tokens: int
    max_sequences: int
    kv_layout: str
    vocab_size: int = 0
    """The exclusive upper bound of token ids; 0 if unknown. `submit` refuses larger ids, since one of them would fail a
    whole step.
    """
    hands_over_running_kv: bool = False
    """True if `Engine.hand_over` is supported for decoding sequences."""
    streams_kv: bool = False
    named_kv: bool = False
    """True if the engine supports `EngineRequest.kv_name` and `named` handles."""
    scores_prompts: bool = False
    """True if the engine computes `SamplingParams.prompt_logprobs`; otherwise `submit` refuses them."""
    pools: frozenset[Pooling] = frozenset()
    """The values of `EngineRequest.pooling` that the engine computes; `submit` refuses others."""
    generates: bool = True
    """True if the engine generates tokens; otherwise `submit` refuses sequences without `EngineRequest.pooling`."""
    whole_prompts: bool = False
    """True if a prompt is computed in one step, since its tokens attend to later ones."""
    seeds_by_position: bool = True
    """True if a seeded sequence draws the same tokens after a move to another worker. Otherwise, only sequences that
    stay on one worker repeat.
    """
    kv_once: bool = False
    """True if the blocks of a handle can be read only once. A second reader gets other content without an error. If
    False, a second fetch gets the same blocks or fails with KvLost.
    """
    first_token_from: Literal["prefill", "decode"] = "prefill"
    """The side that samples the first token. With "decode", the prefill worker samples no token, and the decode worker
    recomputes the prompt's last one.
    """
    kv_nonce: bytes = b""
    """The nonce in the pool's file, by which processes on the host identify it; empty if they cannot map it."""
    chunk_tokens: int = 0
    """The upper bound of the prompt tokens in one step; 0 if unknown."""
    compute: Compute | None = None
    """The inputs for computing utilisation; None if unknown."""
    kv_shape: KvShape | None = None
    """The KV of one sequence by kind of layer. None if all layers store the whole sequence, at `kv_block_bytes` a
    block.
    """
    sleeps: bool = False
    """True if `Engine.sleep` and `Engine.wake` can be called."""
    drops_weights: bool = False
    """True if `Engine.sleep` can drop the weights. `Engine.wake` then reads them again, but skips the rest of a start.
    """
    loads_adapters: bool = False
    """True if the engine can load an adapter that it was not started with, from the folder that a sequence names."""
    images: bool = False
    """True if prompts may contain images; otherwise `submit` refuses them."""
    variant: str = ""
    """A short text with everything except model and device that affects step times: types, width, threads, versions."""

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of KV of a sequence of `tokens` tokens, rounded up to whole blocks."""
        if self.kv_shape is not None:
            return self.kv_shape.sequence_bytes(tokens)
        return -(-tokens // self.block_size_tokens) * self.kv_block_bytes

    def knows(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether all ids are in the model's vocabulary; True if its size is unknown."""
        return not self.vocab_size or all(0 <= token_id < self.vocab_size for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters for drawing tokens.

    If `Capabilities.seeds_by_position` is set, noise depends only on `seed` and the token's position. A sequence can
    then move to another worker without changing its tokens.
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
    """The grammar that constrains the generated tokens (libs/engine/guides.py); empty for none."""
    min_tokens: int = 0
    """The number of tokens to generate before a token may end the sequence."""
    prompt_logprobs: bool = False
    """True if the first token's logprob contains the prompt's; requires `logprobs`."""
    prompt_top_logprobs: int = 0

    @property
    def follows_from_tokens(self) -> bool:
        """True if a sequence continues identically once its tokens are resubmitted as a prompt.

        This requires greedy decoding, without the penalties that count generated tokens only.
        """
        return not (self.temperature or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, with its file if this engine computes the prompt."""

    span: ImageSpan
    data: bytes = b""
    """The image's file; empty in phase DECODE, which receives the KV and encodes nothing."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    sequence_id: int
    """An id that no other live sequence of this engine has."""
    request_id: str
    phase: EnginePhase
    token_ids: NDArray[np.int32]
    """[tokens] 1D int32: the prompt, then the tokens that other workers have already generated."""
    prompt_tokens: int
    max_output_tokens: int
    """The upper bound of generated tokens, counted from the end of the prompt."""
    sampling: SamplingParams
    chain_root: bytes = b""
    """The root of the block hash chain; empty disables prefix reuse for the sequence."""
    kv: KvHandle | None = None
    kv_name: bytes = b""
    """The handle for the prompt's blocks, valid before the prompt begins; if empty, the engine makes one."""
    tpot_target_ns: int = 0
    """The target time per output token after the first; 0 for none."""
    first_token_due_ns: int = 0
    """The deadline of the first token in Unix nanoseconds; 0 for none."""
    adapter: str = ""
    """The name of the adapter to apply to the model; empty for none."""
    adapter_source: str = ""
    """The folder of the adapter, if the engine was not started with it."""
    yields: bool = False
    """True for background work such as a batch line.

    The engine computes its prompt only while no other prompt waits.
    """
    pooling: Pooling | None = None
    """The method that makes one vector of the prompt; None to generate tokens.

    A pooled sequence ends without a token or a handle. `chain_root` must be empty unless the method is `Pooling.LAST`.
    """
    second_from: int = 0
    """The position of a pair's second text in the prompt, for models that distinguish the texts; 0 for none."""
    images: tuple[PromptImage, ...] = ()
    """The prompt's images, in order of their position."""
    kind: str = ""
    """The tenant and class whose past answers predict this sequence's length; empty to use all past answers."""


Progress = Callable[[str, float], None]
"""A callback that receives a stage ("loading weights") and the completed fraction of the stage, 0..1."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The identity of a worker, which its engine writes into KV handles."""

    worker_id: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device as used by all processes. Of several devices, the one with the least free memory."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class Engine(Protocol):
    """An engine inside a worker. All methods are called on the event loop's thread."""

    @property
    def name(self) -> str:
        """The engine's name in settings: "torch", "sim" or "vllm"."""
        ...

    @property
    def device(self) -> str:
        """The device that computes, such as "cpu" or "cuda:NVIDIA H200"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The engine's features and limits, valid after `start` has returned."""
        ...

    async def start(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Load the model. Raise StartupError, whose single line gives the remedy."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the device. Keep the weights in host memory, or drop them if `drops_weights` is supported.

        Running sequences are aborted as by `close`, and `events` ends. Idempotent. Raise SleepFailed if only `close`
        can be called afterwards.
        """
        ...

    async def wake(self, identity: EngineIdentity, fetcher: KvFetcher, progress: Progress) -> None:
        """Start again after `sleep`, with an empty KV pool. Raise StartupError on failure.

        Handles from before the sleep are void.
        """
        ...

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the device, awake or asleep; None if unknown or if a sleeping engine uses none."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raise InvalidRequest if it can never run here, QueueFull if the queue is at its bound."""
        ...

    def abort(self, sequence_id: int) -> None:
        """End a sequence with FinishReason.ABORTED, at the latest after the running step, and free its blocks.

        A finished sequence loses the lease on its blocks. Unknown ids are ignored.
        """
        ...

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...]) -> None:
        """Continue a streamed sequence from the tokens sampled by the worker that computed its prompt.

        Other ids are ignored. Raise InvalidRequest for tokens from which the sequence cannot continue.
        """
        ...

    def hand_over(self, sequence_id: int) -> None:
        """End a sequence at its next step boundary with FinishReason.HANDED_OVER, and hold its KV for another worker.

        A sequence in its prompt is handed over with its first token. A sequence that ends in that step ends as usual.
        Unknown ids and phase PREFILL are ignored.
        """
        ...

    def set_prefill_budget(self, tokens: int) -> None:
        """Set the number of prompt tokens that a step may compute beside decodes, from the next step on.

        At 0, prompts wait.
        """
        ...

    def set_prefill_chunk(self, tokens: int) -> None:
        """Set the upper bound of prompt tokens per step, whatever the budget, from the next step on."""
        ...

    def set_step_time(self, model: StepTimeModel) -> None:
        """Set the step-time model by which prompt chunks and new decodes are limited to meet running TPOT targets."""
        ...

    async def measure_prefill(self, tokens: int) -> int | None:
        """Run a trial step that computes prompts of `tokens` tokens in total, and return its nanoseconds.

        Return None if there is no room, or if decoding sequences would miss their TPOT targets. Raise QueueFull while
        another measurement waits.
        """
        ...

    def events(self) -> AsyncIterator[EngineEvent]:
        """Iterate over everything that the engine reports, for one consumer. Raise the error that ended the engine."""
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
        """Open the blocks behind a handle for reading. Blocks of a streamed prompt follow as they are filled.

        After a `take` without a chunk, `news` is called once, when blocks may have become ready. With `in_place` the
        receiver reads the pool's file, so chunks may be larger than a message. A `named` handle may be unknown until
        its prompt arrives. Raise KvLost for an unknown handle, KvMismatch for another layout.
        """
        ...

    def release(self, opaque: bytes) -> None:
        """Free the blocks behind a handle, which the receiver has. Unknown handles are ignored."""
        ...

    def abandon(self, opaque: bytes) -> None:
        """Shorten the lease of a handle whose gateway is gone.

        The blocks are freed well before the lease would end, unless a receiver reads them soon. Unknown handles are
        ignored.
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
