"""The largest decode batch that a step-time model says holds a TPOT target, and what it and larger ones really take."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from libs.engine.port import Capabilities
from libs.engine.runner import Runner
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.slack import largest_batch
from load.engine.step_grid import Cell, batch_of

CONTEXT_TOKENS = 384
MOST_SEQUENCES = 32
TARGETS = (1.5, 2.0, 3.0)
"""TPOT targets, in steps of one sequence."""
LARGER = 1.25
"""The batch that should miss a target is larger by so much, and by one sequence at least."""
STEPS = 7


@dataclass(frozen=True, slots=True)
class HeldTarget:
    """What a choice came to: medians of measured steps."""

    target_ms: float
    batch: int
    """The largest that the model says holds the target."""
    batch_ms: float
    larger: int
    larger_ms: float


async def held_targets(runner: Runner, capabilities: Capabilities, model: StepTimeModel) -> list[HeldTarget]:
    """Choose a batch for each target, then run it and a larger one in turns."""
    one_ns = model.decode_ns(StepWork(decode_sequences=1, decode_kv_tokens=CONTEXT_TOKENS))
    found = []
    for steps in TARGETS:
        batch = largest_batch(model, steps * one_ns, CONTEXT_TOKENS, MOST_SEQUENCES)
        sizes = (batch, max(round(LARGER * batch), batch + 1))
        batches = [batch_of(Cell(None, (size, CONTEXT_TOKENS)), capabilities) for size in sizes]
        took_ms: tuple[list[float], list[float]] = ([], [])
        for _ in range(STEPS):
            for work, durations in zip(batches, took_ms, strict=True):
                start_s = time.perf_counter()
                await runner.run(work)
                durations.append((time.perf_counter() - start_s) * 1e3)
        batch_ms, larger_ms = map(statistics.median, took_ms)
        found.append(HeldTarget(steps * one_ns / 1e6, batch, batch_ms, sizes[1], larger_ms))
    return found


def table(found: list[HeldTarget]) -> str:
    """For people."""
    rows = [
        f"{each.target_ms:>10.1f}{each.batch:>10}{each.batch_ms:>12.1f}{each.larger:>10}{each.larger_ms:>12.1f}"
        for each in found
    ]
    head = f"{'target ms':>10}{'chosen':>10}{'measured':>12}{'larger':>10}{'measured':>12}"
    return "\n".join(["largest decode batch that holds a TPOT target:", head, *rows])


def figures(found: list[HeldTarget]) -> list[dict[str, Any]]:
    """For JSON."""
    return [{name: round(value, 2) for name, value in asdict(each).items()} for each in found]
