"""How well steps can be predicted at all: the same steps over and over, by a model that has not seen them."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import StepReport
from libs.perfmodel.learner import StepKind
from libs.policy.step_time import StepTimeModel
from libs.testing.engines.engine import EventReader
from libs.worker.telemetry.step_times import work_of

DECODING_TOKENS: Final = (24, 40, 56)
"""Prompts of those that decode."""
OUTPUT_TOKENS: Final = 12
BESIDE_TOKENS: Final = (16, 32, 48)
"""Prompts that come while they decode, in turn."""
FIRST_KEY: Final = 1 << 20
ROUND_KEYS: Final = len(DECODING_TOKENS) + len(BESIDE_TOKENS)
MIN_ALIKE: Final = 4
"""Equal steps that are needed to measure how far apart they lie."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Of steps of one kind: relative errors, medians."""

    steps: int
    model_error: float
    """Error of the model's predictions."""
    noise: float
    """Error of the median of equal steps: no model that knows only the work can do better."""


async def repeat(engine: Engine, reader: EventReader, rounds: int) -> list[StepReport]:
    """The steps of `rounds` equal rounds."""
    seen_before = len(reader.events)
    for number in range(rounds):
        await _round(engine, reader, FIRST_KEY + number * ROUND_KEYS)
    return [event.step for event in reader.events[seen_before:] if event.step and event.step.end_unix_ns]


async def _round(engine: Engine, reader: EventReader, key: int) -> None:
    """Some decode, and while they do prompts come one after the other."""
    decoding = [_submit(engine, key + number, tokens, OUTPUT_TOKENS) for number, tokens in enumerate(DECODING_TOKENS)]
    key += len(decoding)

    def have_decoded(least: int) -> bool:
        return all(_tokens(reader, each) >= least for each in decoding)

    for number, tokens in enumerate(BESIDE_TOKENS):
        least = 3 * (number + 1)
        await reader.until(lambda least=least: have_decoded(least))  # type: ignore[misc]
        await reader.ended(_submit(engine, key + number, tokens, 1))
    for each in decoding:
        await reader.ended(each)


def floors(steps: list[StepReport], model: StepTimeModel) -> dict[StepKind, Floor]:
    """By kind, of those steps that were done often enough."""
    alike = defaultdict(list)
    for step in steps:
        work = work_of(step)
        same = (work.prefill_tokens, work.prefill_sequences, work.prefill_context_tokens, work.decode_sequences)
        alike[same].append((work, step.end_unix_ns - step.start_unix_ns))
    errors, noises = defaultdict(list), defaultdict(list)
    for group in alike.values():
        if len(group) < MIN_ALIKE:
            continue
        usual_ns = statistics.median(duration_ns for _, duration_ns in group)
        for work, duration_ns in group:
            errors[StepKind.of(work)].append(abs(model.step_ns(work) / duration_ns - 1))
            noises[StepKind.of(work)].append(abs(usual_ns / duration_ns - 1))
    return {
        kind: Floor(len(found), statistics.median(found), statistics.median(noises[kind]))
        for kind, found in errors.items()
    }


def _submit(engine: Engine, key: int, tokens: int, output_tokens: int) -> int:
    prompt = np.random.default_rng(key).integers(100, 200, tokens, dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.submit(EngineRequest(key, f"r{key}", EnginePhase.BOTH, prompt, tokens, output_tokens, sampling))
    return key


def _tokens(reader: EventReader, key: int) -> int:
    log = reader.log(key)
    return OUTPUT_TOKENS if log.end else len(log.token_ids)
