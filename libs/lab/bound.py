"""The fluid bound, an upper limit for any schedule: it knows the future and divides work without loss."""

from collections.abc import Iterator, Sequence
from typing import Final

from libs.lab.experiment import Experiment
from libs.lab.search import WANTED, Measure
from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS
from libs.policy.worker.pace import largest_batch

LARGEST_CHUNK_TOKENS: Final = 1 << 20
"""A chunk so large that the fixed cost of each step becomes negligible."""


def fluid_rate(experiment: Experiment, measure: Measure = "both") -> float:
    """Return the multiple of the trace's rate at which `WANTED` of the measured value keeps all workers busy.

    The requests or the work that count are those which cost least for their value. The trace is taken to go on as
    it is. Prompts are computed in one chunk, and nothing is computed twice that any worker has computed (an
    unbounded cache shared by all). Decodes run in the largest batches that hold the TPOT, and their reading of
    weights hides behind prompts as far as the interference allows. Latency, KV memory and transfers are left out,
    so no policy can do better for long. A trace that is short beside its answers ends while much of it still
    decodes, and can be served at a higher rate.
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
    batches: dict[int, int] = {}
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
        if rough not in batches:
            found = largest_batch(speed.step_time, experiment.slo.tpot_ns, rough, experiment.max_sequences)
            batches[rough] = max(found, 1)
        reading_ns = model.interference * model.reading_ns(MATRIX_ROWS) / batches[rough]
        each_ns = reading_ns + model.decode_sequence_ns + model.decode_kv_token_ns * context
        prompt_ns = whole.prompt_ns(tokens - cached, tokens * tokens - cached * cached)
        yield prompt_ns + max(request.output_tokens - 1, 0) * each_ns
