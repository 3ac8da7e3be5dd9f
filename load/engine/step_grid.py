"""The steps that `bench_steps` measures: a grid of chunk x batch x context, pure and mixed."""

import itertools
from dataclasses import dataclass

import numpy as np

from libs.engine.port import Capabilities, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepWork, chunks_work

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FOLDS = 4
"""Each cell is judged by a fit on the other parts of the grid."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a grid is made of. The parts of its mixed steps must be among the pure ones."""

    chunks: tuple[tuple[int, int], ...]
    """(prompt tokens, tokens before them that have KV)."""
    decodes: tuple[tuple[int, int], ...]
    """(sequences, tokens that each reads)."""
    mixed_chunks: tuple[tuple[int, int], ...]
    mixed_decodes: tuple[tuple[int, int], ...]


CPU_SIZES = Sizes(
    ((16, 0), (32, 0), (64, 0), (64, 512), (128, 0), (128, 1024), (256, 0), (256, 512), (512, 0), (512, 1024)),
    tuple(itertools.product((1, 2, 3, 4, 6, 8, 12, 16, 24), (128, 384, 768))),
    ((16, 0), (32, 0), (64, 512), (128, 0), (256, 0)),
    ((1, 768), (4, 128), (4, 768), (8, 384), (16, 768), (24, 128)),
)
GPU_SIZES = Sizes(
    (
        *((64, 0), (128, 0), (256, 0), (256, 4096), (512, 0), (512, 2048), (1024, 0), (1024, 4096), (2048, 0)),
        *((2048, 4096), (4096, 0), (4096, 4096), (8192, 0)),
    ),
    tuple(itertools.product((1, 4, 8, 16, 32, 64, 128, 256), (256, 1024, 4096))),
    ((64, 0), (256, 4096), (512, 0), (2048, 0), (8192, 0)),
    ((1, 4096), (8, 256), (8, 4096), (32, 1024), (128, 4096), (256, 256)),
)
"""Where a GPU's floor, and the reading of weights beside which a chunk hides, have long been left."""


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


def grid(device: str, capabilities: Capabilities) -> list[Cell]:
    """Every cell that the model's context and the engine's KV blocks have room for; the parts of the mixed ones are
    among the pure ones."""
    sizes = GPU_SIZES if device.startswith("cuda") else CPU_SIZES
    cells = [
        *(Cell(chunk, None) for chunk in sizes.chunks),
        *(Cell(None, decode) for decode in sizes.decodes),
        *(Cell(chunk, decode) for chunk, decode in itertools.product(sizes.mixed_chunks, sizes.mixed_decodes)),
    ]
    return [cell for cell in cells if _has_room(cell, capabilities)]


def _has_room(cell: Cell, capabilities: Capabilities) -> bool:
    sequences, context = cell.decode or (0, 0)
    length = sum(cell.chunk or (0, 0))
    size = capabilities.block_size_tokens
    blocks = sequences * -(-context // size) + -(-length // size)
    return max(context, length) <= capabilities.max_context_tokens and blocks <= capabilities.kv_blocks


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
