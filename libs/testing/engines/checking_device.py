"""A device for tests of the engine core: it refuses a step whose context is not in the blocks that it names."""

import numpy as np
from numpy.typing import NDArray

from libs.engine.port import EngineRequest
from libs.engine.reports import FinishReason
from libs.engine.runner import Batch, Chunk, Sampled
from libs.engine.sim import TokenSource

SOURCE = TokenSource.builtin()
NOTHING: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class CheckingDevice:
    """Remembers the token and position whose KV is in each slot."""

    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        self.slots = np.full((blocks, block_size_tokens), -1, dtype=np.int64)
        """[blocks, block_size]"""

    def run(self, batch: Batch) -> dict[int, Sampled]:
        """A step, checked before and after."""
        for chunk in batch.chunks:
            self._check(chunk.block_table, chunk.history[: chunk.start])
        for chunk in batch.chunks:
            assert np.array_equal(chunk.history[chunk.start :], chunk.token_ids)
            self.fill(chunk.block_table, chunk.history, chunk.start)
        for chunk in batch.chunks:
            self._check(chunk.block_table, chunk.history)
        return {chunk.sequence_id: SOURCE.sample(chunk) for chunk in batch.chunks if chunk.sample}

    def fill(self, table: NDArray[np.int32], tokens: NDArray[np.int32], start: int = 0) -> None:
        """Put the KV of `tokens` from position `start` on where a block table says."""
        size = self.slots.shape[1]
        for position in range(start, len(tokens)):
            self.slots[table[position // size], position % size] = position << 20 | int(tokens[position])

    def _check(self, table: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        expected = np.arange(len(tokens), dtype=np.int64) << 20 | tokens
        assert np.array_equal(self.slots[table].reshape(-1)[: len(tokens)], expected), "KV is not what was computed"


def reference(
    request: EngineRequest, eos_token_ids: frozenset[int], max_context_tokens: int
) -> tuple[list[int], FinishReason]:
    """The tokens of a sequence that runs alone, one position at a time, and why it ends."""
    tokens, sampling = list(request.token_ids), request.sampling
    while True:
        history = np.array(tokens, dtype=np.int32)
        chunk = Chunk(0, NOTHING, 0, NOTHING, True, sampling, history, request.prompt_tokens)
        tokens.append(SOURCE.sample(chunk).token_id)
        new = tokens[len(request.token_ids) :]
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] in eos_token_ids and not sampling.ignore_eos):
            return new, FinishReason.STOP
        if len(tokens) >= min(request.prompt_tokens + request.max_output_tokens, max_context_tokens):
            return new, FinishReason.LENGTH
