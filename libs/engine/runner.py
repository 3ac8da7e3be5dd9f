"""The runner port: the forward pass under the engine core.

`torch` computes it; `sim` replaces it by a step-time model. Queue, blocks and batches (libs/engine/core.py and related
modules) are the same code for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from libs.engine.port import Capabilities, EngineIdentity, Pooling, Progress, PromptImage, SamplingParams
from libs.engine.reports import Logprob
from libs.policy.step_time import StepWork, chunks_work
from libs.policy.worker.saturation import trial_prompts


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence to compute in this step. Not frozen, since one is created for every token."""

    sequence_id: int
    token_ids: NDArray[np.int32]
    """[n] 1D int32: the tokens to compute."""
    start: int
    """The position of the first token. The blocks hold the KV of positions [0, start)."""
    block_table: NDArray[np.int32]
    """[blocks] 1D int32: the pool blocks for positions [0, start + n)."""
    sample: bool
    """True if a token is sampled after the last position."""
    sampling: SamplingParams
    history: NDArray[np.int32]
    """[start + n] 1D int32: all tokens so far, for penalties and the sim engine's next token."""
    prompt_tokens: int
    scored: NDArray[np.int32] | None = None
    """[scored] 1D int32: the prompt tokens after the chunk's first positions, whose logprobs are requested."""
    adapter: str = ""
    """The name of the adapter to apply to the model; empty for none."""
    adapter_source: str = ""
    """The folder of the adapter, if the engine was not started with it."""
    pooling: Pooling | None = None
    """The way to make one vector of the prompt, computed instead of a token; None if the sequence generates."""
    images: tuple[PromptImage, ...] = ()
    """The images that have tokens in this chunk."""
    second_from: int = 0
    """The position of a pair's second text in the prompt; 0 for none."""

    @property
    def decodes(self) -> bool:
        """True if this is the next token of a running sequence rather than part of a prompt."""
        return self.start >= self.prompt_tokens and len(self.token_ids) == 1


def without_ends(chunk: Chunk, eos_token_ids: frozenset[int], vocab_size: int) -> NDArray[np.bool_] | None:
    """Return [vocab] 1D bool, the tokens allowed before `min_tokens` is reached; None once it is."""
    params = chunk.sampling
    if len(chunk.history) - chunk.prompt_tokens >= params.min_tokens:
        return None
    allowed = np.ones(vocab_size, np.bool_)
    allowed[list(params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids)] = False
    return allowed


@dataclass(slots=True)
class Batch:
    """The work of one step: decodes first, then prompt chunks. Treat as immutable."""

    chunks: tuple[Chunk, ...]
    _work: StepWork | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def work(self) -> StepWork:
        """The batch in the terms of the step-time model and telemetry, computed once."""
        if self._work is None:
            self._work = self._reckon()
        return self._work

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """The images that have tokens in this step, each once."""
        found = {image.span.digest: image for chunk in self.chunks for image in chunk.images}
        return tuple(found.values())

    def _reckon(self) -> StepWork:
        sequences = kv_tokens = 0
        prompts: list[tuple[int, int]] = []
        for chunk in self.chunks:
            end = len(chunk.history)
            if chunk.decodes:
                sequences += 1
                kv_tokens += end
            else:
                prompts.append((chunk.start, end))
        decode = StepWork(decode_sequences=sequences, decode_kv_tokens=kv_tokens)
        return chunks_work(prompts, decode) if prompts else decode


@dataclass(slots=True)
class Sampled:
    """A sampled token with its logprobs, or the fault of its sequence."""

    token_id: int
    logprob: Logprob | None = None
    fault: str = ""
    """The reason why there is no token. Only this sequence cannot continue."""
    prompt: tuple[Logprob, ...] = ()
    """Logprobs of the tokens in the chunk's `scored`."""
    pooled: NDArray[np.float32] | None = None
    """1D float32: one token's [hidden] state, the sum of the chunk's, or the [1] output of a head. None unless it is
    pooled.
    """

    @property
    def logprobs(self) -> tuple[Logprob, ...]:
        """The logprob in the form that an output carries."""
        return (self.logprob,) if self.logprob else ()


class ImageCounts(NamedTuple):
    """Counts of images since the start, and the embeddings that are kept."""

    used: int = 0
    """Images whose embeddings went into a prompt."""
    encoded: int = 0
    cache_bytes: int = 0


class Runner(Protocol):
    """A device with weights and one KV pool."""

    @property
    def name(self) -> str:
        """The engine's name, such as "torch" or "sim"."""
        ...

    @property
    def device(self) -> str: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    async def load(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Load the weights and allocate the pool, shared under this identity if configured. Raise StartupError."""
        ...

    async def sleep(self) -> None:
        """Keep the weights in host memory and free the device. Requires `Capabilities.sleeps` and no call of `run`."""
        ...

    async def wake(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Load the weights again after `sleep`. Raise StartupError if that fails."""
        ...

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Compute the batch and return tokens by sequence id. One call at a time.

        Each chunk with `sample` gets a token. A chunk that only scores gets an arbitrary one, and so does a pooled one,
        with its vector (for `Pooling.MEAN` every chunk, otherwise the chunk with `sample`). A cancelled call raises
        only once the device is done with the batch's blocks, so that they can be freed.
        """
        ...

    @property
    def image_counts(self) -> ImageCounts: ...

    def unencoded(self, images: Sequence[PromptImage]) -> list[PromptImage]:
        """Return the images whose embeddings are not kept."""
        ...

    async def encode(self, images: Sequence[PromptImage]) -> dict[bytes, str]:
        """Compute the images' embeddings for the next `run`. Return the faults by digest. Not during `run`."""
        ...

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        """Return the bytes of each block as views, valid until the block changes; empty if KV is only simulated.

        This method and `write_blocks` are also called during `run`, for blocks that the running batch does not
        write. `write_blocks` is called on its callers' threads as well. Nothing is locked, since the memory is
        disjoint. Each call is small.
        """
        ...

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write blocks for the next `run`, and compare the written bytes with the checksums. The inverse of
        `read_blocks`.

        Raise KvLost on a difference, with the block zeroed, and KvMismatch for a wrong number of bytes.
        """
        ...

    async def transfer(self, data_bytes: int) -> None:
        """Wait as long as a simulated link takes for the bytes. Return at once if the link is real."""
        ...

    async def close(self) -> None:
        """Free the device and end the runner's threads. Idempotent."""
        ...


_GREEDY: Final = SamplingParams(temperature=0.0)


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """Return the number of blocks that a measured step of `tokens` tokens writes."""
    return sum(-(-length // block_size_tokens) for length in trial_prompts(tokens))


def trial_batch(tokens: int, blocks: list[int], capabilities: Capabilities) -> Batch:
    """Return whole prompts of random tokens that add up to `tokens`. Ids are negative, so they match no sequence."""
    random = np.random.default_rng(tokens)
    table = np.array(blocks, dtype=np.int32)
    chunks = []
    for number, length in enumerate(trial_prompts(tokens), start=1):
        ids = random.integers(0, capabilities.vocab_size or 2, length, dtype=np.int32)
        held = -(-length // capabilities.block_size_tokens)
        chunks.append(
            Chunk(
                sequence_id=-number,
                token_ids=ids,
                start=0,
                block_table=table[:held],
                sample=True,
                sampling=_GREEDY,
                history=ids,
                prompt_tokens=length,
            )
        )
        table = table[held:]
    return Batch(tuple(chunks))
