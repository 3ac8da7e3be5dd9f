"""How far any schedule could get: the fluid bound, which knows the future and splits work without loss."""

from typing import Final

from libs.lab.experiment import Experiment
from libs.lab.search import WANTED
from libs.policy.speed import Speed
from libs.policy.step_time import MATRIX_ROWS
from libs.policy.worker.slack import largest_batch

LARGEST_CHUNK_TOKENS: Final = 1 << 20
"""A chunk so large that what each step costs beside its tokens counts for nothing."""


def fluid_rate(experiment: Experiment) -> float:
    """Times the trace's rate at which `WANTED` of the work fills all workers from the first arrival to the last.

    Prompts in one chunk, nothing computed twice that any worker has had (an unbounded cache shared by all), decodes in
    the largest batches that hold the TPOT, their reading of weights hidden behind prompts as far as the interference
    allows. Latency, KV memory and transfers are left out, so no policy can do better.
    """
    speed, model = experiment.speed, experiment.step_time
    whole = Speed(model, LARGEST_CHUNK_TOKENS)
    seen: set[int] = set()
    total_ns = 0.0
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
        total_ns += whole.prompt_ns(tokens - cached, tokens * tokens - cached * cached)
        context = tokens + request.output_tokens / 2
        rough = 1 << max(int(context).bit_length() - 1, 6)  # shorter than it is: batches as large as could be
        if rough not in batches:
            found = largest_batch(speed.step_time, experiment.slo.tpot_ns, rough, experiment.max_sequences)
            batches[rough] = max(found, 1)
        reading_ns = model.interference * model.reading_ns(MATRIX_ROWS) / batches[rough]
        each_ns = reading_ns + model.decode_sequence_ns + model.decode_kv_token_ns * context
        total_ns += max(request.output_tokens - 1, 0) * each_ns
    span_ns = experiment.trace.duration_ns + experiment.slo.ttft_limit_ns(0.0)
    return experiment.workers * span_ns / (WANTED * total_ns) if total_ns else 0.0
