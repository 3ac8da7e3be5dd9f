"""The runner port: the forward pass under the engine core.

The `torch` runner computes the forward pass. The `sim` runner replaces it by a step-time model. Both work under the
same queue, blocks and batches (libs/engine/core.py).
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
    """The tokens of one sequence to compute in a step. Not frozen, since one is created for every token."""

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
    """The method that makes one vector of the prompt, instead of a token; None if the sequence generates."""
    images: tuple[PromptImage, ...] = ()
    """The images that have tokens in this chunk."""
    second_from: int = 0
    """The position of a pair's second text in the prompt; 0 for none."""

    @property
    def decodes(self) -> bool:
        """True if this is the next token of a running sequence rather than part of a prompt."""
        return self.start >= self.prompt_tokens and len(self.token_ids) == 1


def without_ends(chunk: Chunk, eos_token_ids: frozenset[int], vocab_size: int) -> NDArray[np.bool_] | None:
    """Return [vocab] 1D bool: the tokens allowed before `min_tokens` is reached; None after that."""
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
        """The batch as the step-time model and telemetry describe it, computed once."""
        if self._work is None:
            self._work = self._reckon()
        return self._work

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """The distinct images that have tokens in this step."""
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
    """The reason why there is no token; empty without a fault. Other sequences of the batch continue."""
    prompt: tuple[Logprob, ...] = ()
    """The logprobs of the tokens in the chunk's `scored`."""
    pooled: NDArray[np.float32] | None = None
    """1D float32 for a pooled chunk, else None: a token's [hidden] state, the sum over the chunk's, or a head's [1]
    output.
    """

    @property
    def logprobs(self) -> tuple[Logprob, ...]:
        """The logprob as the tuple that an output contains."""
        return (self.logprob,) if self.logprob else ()


class ImageCounts(NamedTuple):
    """The counts of images since the start, and the bytes of cached embeddings."""

    used: int = 0
    """The number of images whose embeddings became part of a prompt."""
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
        """Load the weights and allocate the pool. Raise StartupError.

        A shared pool's file is named after this identity.
        """
        ...

    async def sleep(self) -> None:
        """Copy the weights to host memory and free the device.

        Requires `Capabilities.sleeps`, and that no `run` is in progress.
        """
        ...

    async def wake(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Load the weights again after `sleep`. Raise StartupError if that fails."""
        ...

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Compute the batch and return a `Sampled` by sequence id. Calls must not overlap.

        Each chunk with `sample` gets a token. A chunk that is only scored or pooled gets an arbitrary one. With
        `Pooling.MEAN` every chunk gets a vector, otherwise only the chunk with `sample`. A cancelled call raises only
        after the device has finished with the batch's blocks, so that they can be freed.
        """
        ...

    @property
    def image_counts(self) -> ImageCounts: ...

    def unencoded(self, images: Sequence[PromptImage]) -> list[PromptImage]:
        """Return the images whose embeddings are not cached."""
        ...

    async def encode(self, images: Sequence[PromptImage]) -> dict[bytes, str]:
        """Compute the images' embeddings for the next `run`, and return faults by digest.

        Must not overlap with `run`.
        """
        ...

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        """Return the bytes of each block as views, valid until the block changes; empty if KV is only simulated.

        This method and `write_blocks` may be called during `run`, for blocks that its batch does not write. Several
        threads may call `write_blocks` at once. No lock is needed, since no two calls share a block.
        """
        ...

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write blocks before the next `run`, and compare the written bytes with the checksums.

        Raise KvLost on a difference, after zeroing the block, and KvMismatch for a wrong number of bytes.
        """
        ...

    async def transfer(self, data_bytes: int) -> None:
        """Wait for the time that a simulated link takes for the bytes. Return at once if the link is real."""
        ...

    async def close(self) -> None:
        """Free the device and end the runner's threads. Idempotent."""
        ...


_GREEDY: Final = SamplingParams(temperature=0.0)


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """Return the number of blocks that a trial step of `tokens` tokens writes."""
    return sum(-(-length // block_size_tokens) for length in trial_prompts(tokens))


def trial_batch(tokens: int, blocks: list[int], capabilities: Capabilities) -> Batch:
    """Return a batch of whole prompts of random tokens, `tokens` in total.

    Their ids are negative, so no sequence has them.
    """
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
