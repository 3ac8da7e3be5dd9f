"""The steps that `bench_steps` measures: a grid of chunk x batch x context, pure and mixed."""

import itertools
from dataclasses import dataclass

import numpy as np

from libs.engine.port import Capabilities, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.perfmodel import StepKind, StepWork, chunks_work

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FOLDS = 4
"""Each cell is judged by a fit on the other parts of the grid."""
CHUNKS = ((16, 0), (32, 0), (64, 0), (64, 512), (128, 0), (128, 1024), (256, 0), (256, 512), (512, 0), (512, 1024))
"""(prompt tokens, tokens before them that have KV)."""
DECODES = tuple(itertools.product((1, 2, 3, 4, 6, 8, 12, 16, 24), (128, 384, 768)))
"""(sequences, tokens that each reads)."""
MIXED_CHUNKS = ((16, 0), (32, 0), (64, 512), (128, 0), (256, 0))
MIXED_DECODES = ((1, 768), (4, 128), (4, 768), (8, 384), (16, 768), (24, 128))


@dataclass(frozen=True)
class Cell:
    """One step of the grid: a prompt chunk, decodes, or both."""

    chunk: tuple[int, int] | None
    decode: tuple[int, int] | None

    @property
    def kind(self) -> StepKind:
        """What the step does."""
        if self.decode is None:
            return StepKind.PREFILL
        return StepKind.MIXED if self.chunk else StepKind.DECODE

    @property
    def work(self) -> StepWork:
        """The step in the figures of the model."""
        sequences, context = self.decode or (0, 0)
        decode = StepWork(decode_sequences=sequences, decode_kv_tokens=sequences * context)
        tokens, start = self.chunk or (0, 0)
        return chunks_work([(start, start + tokens)], decode)


def grid() -> list[Cell]:
    """Every cell; the parts of the mixed ones are among the pure ones."""
    return [
        *(Cell(chunk, None) for chunk in CHUNKS),
        *(Cell(None, decode) for decode in DECODES),
        *(Cell(chunk, decode) for chunk, decode in itertools.product(MIXED_CHUNKS, MIXED_DECODES)),
    ]


def batch_of(cell: Cell, capabilities: Capabilities) -> Batch:
    """The cell as work for a runner, on blocks of its own."""
    size, free, keys = capabilities.block_size_tokens, itertools.count(), itertools.count(1)
    random = np.random.default_rng(3)

    def chunk(start: int, tokens: int, prompt_tokens: int) -> Chunk:
        history = random.integers(100, 40_000, start + tokens, dtype=np.int32)
        table = np.fromiter(itertools.islice(free, -(-len(history) // size)), np.int32)
        return Chunk(next(keys), history[start:], start, table, True, GREEDY, history, prompt_tokens)

    chunks = []
    if cell.decode:
        sequences, context = cell.decode
        chunks += [chunk(context - 1, 1, context - 1) for _ in range(sequences)]
    if cell.chunk:
        tokens, start = cell.chunk
        chunks.append(chunk(start, tokens, start + tokens))
    return Batch(tuple(chunks))


def folds(cells: list[Cell]) -> list[list[Cell]]:
    """All cells in `FOLDS` parts, each kind spread evenly over them at random."""
    random = np.random.default_rng(11)
    found: list[list[Cell]] = [[] for _ in range(FOLDS)]
    for kind in StepKind:
        mine = [cell for cell in cells if cell.kind is kind]
        for place, index in enumerate(random.permutation(len(mine))):
            found[place % FOLDS].append(mine[index])
    return found
