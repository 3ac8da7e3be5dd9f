"""The runner port: the forward pass under the engine core. `torch` computes it, `sim` replaces it by a step-time model.

Queue, blocks and batches (libs/engine/core.py and its neighbours) are the same code for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.engine.port import Capabilities, EngineIdentity, Progress, SamplingParams
from libs.engine.reports import Logprob
from libs.policy.step_time import StepWork, chunks_work


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence to compute in this step. Like `SequenceOutput` it is made for every token: not frozen."""

    sequence_id: int
    token_ids: NDArray[np.int32]
    """[n] 1D int32: the tokens to compute."""
    start: int
    """Position of the first of them; KV of positions [0, start) is in the blocks."""
    block_table: NDArray[np.int32]
    """[blocks] 1D int32: pool blocks that hold, or will hold, positions [0, start + n)."""
    sample: bool
    """Whether a token is sampled after the last position."""
    sampling: SamplingParams
    history: NDArray[np.int32]
    """[start + n] 1D int32: all tokens so far (penalties, and the sim engine's next token)."""
    prompt_tokens: int
    scored: NDArray[np.int32] | None = None
    """[scored] 1D int32: the prompt's tokens after each of the first positions here, whose logprobs are wanted."""
    adapter: str = ""
    """Name of the adapter that the model computes it with; empty: none."""
    adapter_source: str = ""
    """Its folder, where the engine has not been started with it."""

    @property
    def decodes(self) -> bool:
        """Whether it is the next token of a running sequence rather than part of a prompt."""
        return self.start >= self.prompt_tokens and len(self.token_ids) == 1


def without_ends(chunk: Chunk, eos_token_ids: frozenset[int], vocab_size: int) -> NDArray[np.bool_] | None:
    """[vocab] 1D bool: which tokens may come while the sequence has fewer than it must have; None: it has enough."""
    params = chunk.sampling
    if len(chunk.history) - chunk.prompt_tokens >= params.min_tokens:
        return None
    allowed = np.ones(vocab_size, np.bool_)
    allowed[list(params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids)] = False
    return allowed


@dataclass(slots=True)
class Batch:
    """One step's work. Decodes first, then prompt chunks. Not to be changed."""

    chunks: tuple[Chunk, ...]
    _work: StepWork | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def work(self) -> StepWork:
        """In the figures of the step-time model and of telemetry; reckoned once."""
        if self._work is None:
            self._work = self._reckon()
        return self._work

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
    """One sampled token."""

    token_id: int
    logprob: Logprob | None = None
    fault: str = ""
    """Why there is no token after all: this sequence alone cannot go on."""
    prompt: tuple[Logprob, ...] = ()
    """Of the tokens that the chunk has `scored`."""

    @property
    def logprobs(self) -> tuple[Logprob, ...]:
        """As an output carries it."""
        return (self.logprob,) if self.logprob else ()


class Runner(Protocol):
    """A device with weights and one KV pool."""

    @property
    def name(self) -> str:
        """The engine's name, e.g. "torch"."""
        ...

    @property
    def device(self) -> str:
        """What it computes on."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        ...

    async def load(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Load weights, allocate the pool, shared under this identity where that is asked for. Raises StartupError."""
        ...

    async def sleep(self) -> None:
        """Keep the weights in host memory, free the device. Only where `Capabilities.sleeps`; no `run` is under way."""
        ...

    async def wake(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Load the weights again after `sleep`. Raises StartupError."""
        ...

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Compute the batch; a token for each chunk with `sample`, by its id; one that scores and samples nothing has
        any token. One at a time.

        A cancelled call raises only once the device is done with the batch's blocks, so they can be freed then.
        """
        ...

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        """The bytes of each block, as views that are good until it changes; none where KV is only simulated.

        This and `write_blocks` are called also while `run` is under way, for blocks that the running batch does not
        write, `write_blocks` on threads of its callers too: nothing is locked, memory is disjoint. Each call is small.
        """
        ...

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """The inverse of `read_blocks`, for the next `run` to see; what was written is held against the checksums.

        Raises KvLost where they differ, with the block zeroed, and KvMismatch for a wrong number of bytes.
        """
        ...

    async def transfer(self, data_bytes: int) -> None:
        """Wait as long as the bytes would take where the link is only simulated; return at once otherwise."""
        ...

    async def close(self) -> None:
        """Free the device. Idempotent."""
        ...
