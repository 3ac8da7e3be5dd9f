"""Timed prefill steps of growing size at one engine, from which the smallest saturating chunk is read."""

import asyncio
from collections.abc import Callable
from typing import Final

from libs.engine.port import Engine
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.saturation import MeasuredStep, calibrated, plan_trials

# Tokens of the first steps, which estimate how far a measurement can get.
GUESS_TOKENS: Final = 64
# Runs of which the fastest counts: a disturbed step does not show the device's speed.
GUESSES: Final = 3


async def run_trials(
    engine: Engine,
    known: Callable[[], StepTimeModel],
    *,
    most_tokens: int,
    limit_s: float,
    patience_s: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[MeasuredStep]:
    """Run as many trials as fit, each size several times: within `limit_s` by estimate, started within `patience_s` in
    fact.

    `known` returns the present step-time model. Trials without room or time in the engine are left out, and so are
    all that remain once `goes_on` returns false.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + patience_s
    prior = await _corrected(engine, known, min(GUESS_TOKENS, most_tokens))
    trials = []
    for tokens in plan_trials(prior, most_tokens, round(limit_s * 1e9), round(patience_s * 1e9)):
        if clock() >= end_s or not goes_on():
            break
        duration_ns = await engine.measure_prefill(tokens)
        if duration_ns:
            trials.append(MeasuredStep(tokens, duration_ns))
    return trials


def room_tokens(engine: Engine, most_tokens: int) -> int:
    """Return the size of the largest trial, at most `most_tokens`. Half of the free KV blocks are left to arriving
    prompts.
    """
    free = engine.load().free_kv_blocks * engine.capabilities.block_size_tokens // 2
    return max(min(most_tokens, free), 1)


async def _corrected(engine: Engine, known: Callable[[], StepTimeModel], tokens: int) -> StepTimeModel:
    """Correct the expected step times by a few steps: a guess about the device may be off by an order of magnitude."""
    await engine.measure_prefill(tokens)  # what the first step of a shape sets up is not measured
    took_ns = [await engine.measure_prefill(tokens) for _ in range(GUESSES)]
    fastest_ns = min((each for each in took_ns if each), default=0)
    return calibrated(known(), MeasuredStep(tokens, fastest_ns)) if fastest_ns else known()
