"""Searches over experiments: the highest rate that meets the SLO, the fewest workers, and their best split.

The fluid bound is an upper limit for any schedule, which knows the future and divides work without loss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Final, Literal

from libs.lab.experiment import Experiment, LabReport
from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel
from libs.policy.worker.pace import largest_batch

STEP: Final = 1.05
"""The ratio of one rate to the next lower one."""
LEAP: Final = 4
"""The number of steps taken at once while the edge is far."""
WANTED: Final = 0.9
"""The share of requests, and of work, that must be good."""
# The share of each class that must be good, so that no class is sacrificed for the others.
CLASS_FLOOR: Final = 0.5
MAX_STEPS: Final = 120
"""The maximum number of steps up or down from the first rate, which is a factor of 350."""
_T95: Final = (0.0, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""One-sided 95 % quantiles of Student's t by degrees of freedom (0: one seed, no interval)."""

Measure = Literal["both", "requests", "work"]
"""The measure whose share must be good at a rate: requests, work, or both."""

AtRate = Callable[[float], Sequence[LabReport]]
"""A function that runs each seed at a multiple of the trace's rate."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The edge found by a search over rates."""

    rate_scale: float
    """The largest rate that passes; 0 if none did."""
    reports: Sequence[LabReport]
    """The reports of the runs at that rate."""
    tried: dict[float, float]
    """The lower bound of the good share by rate scale."""


def lower_bound(values: Sequence[float]) -> float:
    """Return the lower bound of the mean at 95 %, or the value itself if there is only one."""
    if len(values) < 2:
        return values[0]
    quantile = _T95[min(len(values) - 1, len(_T95) - 1)]
    return mean(values) - quantile * stdev(values) / sqrt(len(values))


def passes(reports: Sequence[LabReport], measure: Measure = "both") -> float:
    """Return the lower bound of the measured good share; 0 if a class of requests is starved."""
    if any(min(each.score.by_class.values(), default=1.0) < CLASS_FLOOR for each in reports):
        return 0.0
    requests = lower_bound([each.score.slo_attainment for each in reports])
    work = lower_bound([each.score.work_attainment for each in reports])
    return {"both": min(requests, work), "requests": requests, "work": work}[measure]


def highest_rate(
    at_rate: AtRate, start: float = 1.0, *, every_step: bool = False, measure: Measure = "both"
) -> SearchResult:
    """Climb in leaps from a rate that passes, then step by step from the last leap that passed.

    With `every_step` there are no leaps, so that the first step that fails is the edge, even if later rates pass.
    """
    runs: dict[int, Sequence[LabReport]] = {}
    bounds: dict[float, float] = {}

    def good(step: int) -> bool:
        if step not in runs:
            rate = start * STEP**step
            runs[step] = at_rate(rate)
            bounds[rate] = passes(runs[step], measure)
        return bounds[start * STEP**step] >= WANTED

    step = 0
    while not good(step):
        step -= LEAP
        if step < -MAX_STEPS:
            return SearchResult(0.0, (), bounds)
    leap = 1 if every_step else LEAP
    while step < MAX_STEPS and good(step + leap):
        step += leap
    while leap > 1 and step < MAX_STEPS and good(step + 1):
        step += 1
    return SearchResult(start * STEP**step, runs[step], bounds)


def fewest_workers(
    attempt: Callable[[int], LabReport], least: int, most: int, *, guess: int = 0, measure: Measure = "both"
) -> tuple[int, LabReport] | None:
    """Bisect for the fewest workers that meet the SLO; return None if not even `most` do.

    More workers are assumed never to do worse. A guess avoids runs of large clusters, which take longest: steps from
    the guess double until both sides of the edge are known.
    """
    best: tuple[int, LabReport] | None = None
    low, high = least, most
    at = min(max(guess, least), most) if guess else (least + most) // 2
    leap = max(guess // 4, 1)
    while low <= high:
        report = attempt(at)
        if passes([report], measure) >= WANTED:
            best, high = (at, report), at - 1
        else:
            low = at + 1
        if guess and (best is None or low == least):
            at = min(max(at - leap if best else at + leap, low), high)
            leap *= 2
        else:
            at = (low + high) // 2
    return best


Try = Callable[[int], LabReport]
"""A function that runs the experiment with the given number of prefill workers."""


def merit(report: LabReport) -> tuple[float, float, float]:
    """Return a sort key, larger being better: the lesser of requests and work, then requests, then a short TTFT."""
    score = report.score
    return min(score.slo_attainment, score.work_attainment), score.slo_attainment, -score.ttft_s.get("p90", 0.0)


def prompts_share(experiment: Experiment) -> float:
    """Return the share of prompts in the GPU time that the trace needs."""
    work, requests = experiment.work, experiment.trace.requests
    whole = sum(work.ns(each.input_tokens, each.output_tokens) for each in requests)
    return sum(work.prompt_ns(each.input_tokens) for each in requests) / max(whole, 1.0)


def first_guess(experiment: Experiment) -> int:
    """Return the number of prefill workers by their share of the work, leaving at least one worker on each side."""
    return min(max(round(experiment.workers * prompts_share(experiment)), 1), experiment.workers - 1)


def best_split(
    workers: int, guess: int, attempt: Try, enough: Callable[[LabReport], bool] = lambda report: False
) -> LabReport:
    """Climb from the guess one worker at a time, past at most one step without improvement, until the result
    suffices.
    """
    tried: dict[int, LabReport] = {}

    def at(prefill: int) -> LabReport:
        if prefill not in tried:
            tried[prefill] = attempt(prefill)
        return tried[prefill]

    best = guess
    at(best)
    for step in (1, -1):
        here, misses = best, 0
        while 1 <= here + step < workers and misses < 2 and not enough(at(best)):
            here += step
            if merit(at(here)) > merit(at(best)):
                best, misses = here, 0
            else:
                misses += 1
    return at(best)


LARGEST_CHUNK_TOKENS: Final = 1 << 20
"""A chunk so large that the fixed cost of each step becomes negligible."""


def fluid_rate(experiment: Experiment, measure: Measure = "both") -> float:
    """Return the multiple of the trace's rate at which `WANTED` of the measured value keeps all workers busy.

    Only the requests or the work with the lowest cost for their value count. The trace is assumed to continue as it is.
    Prompts are computed in one chunk, and nothing is computed twice (an unbounded cache shared by all workers). Decodes
    run in the largest batches that hold the TPOT, and their reading of weights hides behind prompts as far as the
    interference allows. Latency, KV memory and transfers are left out, so no policy can do better for long. A trace
    that is short beside its answers ends while much of it still decodes, and can be served at a higher rate.
    """
    requests = experiment.trace.requests
    costs = list(_costs(experiment))
    works = [experiment.work.ns(each.input_tokens, each.output_tokens) for each in requests]
    least_ns = {"requests": _least(costs, [1.0] * len(costs)), "work": _least(costs, works)}
    needed_ns = max(least_ns.values()) if measure == "both" else least_ns[measure]
    span_ns = experiment.trace.duration_ns + experiment.slo.ttft_limit_ns(0.0)
    return experiment.workers * span_ns / needed_ns if needed_ns else 0.0


def _least(costs: Sequence[float], values: Sequence[float]) -> float:
    """Return the lowest cost of `WANTED` of the total value, taking the cheapest first and the last one in part."""
    left = WANTED * sum(values)
    total = 0.0
    for cost, value in sorted(zip(costs, values, strict=True), key=lambda each: each[0] / each[1]):
        part = min(left / value, 1.0)
        total += part * cost
        left -= part * value
        if left <= 0.0:
            break
    return total


def _costs(experiment: Experiment) -> Iterator[float]:
    """Yield the unhindered GPU time of each request in ns."""
    speed, model = experiment.speed, experiment.step_time
    whole = Speed(model, LARGEST_CHUNK_TOKENS)
    seen: set[int] = set()
    least_ns: dict[int, float] = {}
    for request in experiment.trace.requests:
        cached = 0
        for hash_id in request.hash_ids:
            if hash_id not in seen:
                break
            cached += experiment.trace.block_tokens
        seen.update(request.hash_ids)
        tokens = request.input_tokens
        cached = min(cached, tokens - 1)
        context = tokens + request.output_tokens / 2
        rough = 1 << max(int(context).bit_length() - 1, 6)  # rounded down, for the largest possible batch
        if rough not in least_ns:
            most = largest_batch(speed.step_time, experiment.slo.tpot_ns, rough, experiment.max_sequences)
            least_ns[rough] = _sequence_ns(model, max(most, 1))
        each_ns = least_ns[rough] + model.decode_kv_token_ns * context
        prompt_ns = whole.prompt_ns(tokens - cached, tokens * tokens - cached * cached)
        yield prompt_ns + max(request.output_tokens - 1, 0) * each_ns


def _sequence_ns(model: StepTimeModel, most: int) -> float:
    """Return the lowest cost of one sequence in a decode step of at most `most` sequences beside prompts, without KV.

    The cost rises or falls throughout between the batches at which the model changes, so it is lowest at one of them.
    """
    changes = {min(batch, most) for batch in (model.saturating_sequences, model.graph_sequences, most) if batch}

    def each_ns(batch: int) -> float:
        rows = max(batch, MATRIX_ROWS)
        reading_ns = model.reading_ns(rows) - (1 - model.interference) * model.hiding_ns(rows)
        return (reading_ns + model.sequences_ns(batch)) / batch

    return min(map(each_ns, changes))
