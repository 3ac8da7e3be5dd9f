"""A model's latency after a change of roles: the end of its backlog, and TTFT and TPOT after it.

Waiting prompts are computed with the capacity that arrivals leave. Afterwards prompts meet the queue that chance
arrivals create at that utilisation.
"""

from dataclasses import replace
from math import log, sqrt
from typing import Final

from libs.policy.planner.hindsight import MAX_NS, outlook
from libs.policy.pressure import Split, Workload, decode_step_ns, prompt_speed
from libs.policy.verdict.state import PRESSURE, QUEUED_S, ModelState, Promise, PromisedFigure, RoleCounts, in_hand_ns

MOST_S: Final = MAX_NS / 1e9
"""The bound on the promised time until a backlog is gone."""
# The same number of standard errors on either side as for pressures.
ERRORS: Final = 1.5
LEAST_ERROR: Final = 0.1
"""The minimum relative error of the arrival rate."""
TAIL: Final = 0.05
SURE_BUSY: Final = 0.9
"""The utilisation above which neither the end of a backlog nor a latency is predicted."""
MOST_BUSY: Final = 0.95
"""The bound on the utilisation at the worse end of a range."""
# Sequences begin and end together by chance, so the slowest twentieth of requests decodes in larger batches.
TPOT_ERRORS: Final = (0.2, 0.3)

SETTLED: Final = 5
"""The number of iterations after which the number of sequences and their step time have converged."""
MOST_TIMES: Final = 4.0
"""The bound on predicted sequences, as a multiple of the maximum that decode workers run."""


def aftermath(state: ModelState, work: Workload, counts: RoleCounts, then: Split) -> dict[PromisedFigure, Promise]:
    """Return the promises, other than pressure, for these roles; `work` and `then` are the work and the split.

    There is no entry for a negligible backlog. A backlog that may never end has no entry either, and then TTFT has
    none.
    """
    found = {}
    speed = prompt_speed(state.engine, work, counts.prefill, counts.mixed, counts.lending)
    # Steps are only as full as possible while more prompts wait.
    share = state.prompt_yield if state.has_backlog else 1.0
    if state.arrival_rate < speed * share * SURE_BUSY:
        backlog = _backlog(state, counts, speed, share)
        if backlog is not None:
            found[PromisedFigure.BACKLOG] = backlog
        # Near a pressure of 1 requests may wait for a place to decode before their prompts are computed.
        if then.decode_pressure <= SURE_BUSY:
            found[PromisedFigure.TTFT] = _ttft(state, work, counts, then, speed)
    if state.pressures.decode > PRESSURE.clear and counts.mixed:
        settled = outlook(state.engine, replace(work, waiting_ns=0.0), then, counts.lending)
        tpot_ms, (under, over) = settled.tpot_ns / 1e6, TPOT_ERRORS
        found[PromisedFigure.TPOT] = Promise(tpot_ms, tpot_ms * (1 - under), tpot_ms * (1 + over))
    return found


def decodes_to_come(state: ModelState, work: Workload, counts: RoleCounts) -> Workload:
    """Return the work after the prompts that these roles compute have become decodes.

    A backlog that lasts as long as an answer brings as many sequences as the roles can compute; a shorter one brings
    fewer. If the lengths of prompts or answers are unknown, the work is returned unchanged.
    """
    if not (state.prompt_tokens and state.output_tokens and counts.mixed):
        return work
    engine, prompt_s = state.engine, state.prompt_tokens / (state.prompt_speed or state.engine.chunk_speed) / 1e9
    speed = prompt_speed(engine, work, counts.prefill, counts.mixed, counts.lending)
    rate, context = min(state.arrival_rate, speed), state.prompt_tokens + state.output_tokens / 2
    drains_s = work.waiting_ns / 1e9 / (speed - rate) if speed > rate else MAX_NS / 1e9
    decodes = float(work.decodes)
    for _ in range(SETTLED):
        step_s = decode_step_ns(engine, max(decodes, 1.0), max(decodes, 1.0) * context, counts.mixed) / 1e9
        lasts_s = state.output_tokens * step_s
        computed = rate + (speed - rate) * min(drains_s / lasts_s, 1.0)
        decodes = min(computed / prompt_s * lasts_s, MOST_TIMES * engine.max_sequences * counts.mixed)
    if decodes <= work.decodes:
        return work
    return replace(work, decodes=round(decodes), kv_tokens=max(round(decodes * context), work.kv_tokens))


def _backlog(state: ModelState, counts: RoleCounts, speed: float, share: float) -> Promise | None:
    """Return the time in s until no more prompts wait than the prefill workers have in hand.

    It is None if that time is negligible or may never come. `share` is the measured share of `speed`.
    """
    waits_s = (state.work.waiting_ns - in_hand_ns(state.engine, counts.prefill)) / 1e9
    rate, error = state.arrival_rate, ERRORS * _error(state)
    left = speed * share - rate
    # If arrivals may equal the computed prompts, the range has no end.
    if waits_s < QUEUED_S * left or rate * (1 + error) >= speed * share:
        return None
    # Chance arrivals while the backlog lasts: the spread of a random walk's first passage.
    noise = rate * _prompt_ns(state) / 1e9 * left / waits_s
    then = waits_s / left
    least = waits_s / (left + rate * error + ERRORS * sqrt(noise))
    # The last prompts are computed in steps that are not full and must end first.
    step_s = state.engine.chunk_tokens / state.engine.chunk_speed / 1e9
    slowest = max(speed * min(_alone_share(state), share) - rate * (1 + error), speed * share * (1 - MOST_BUSY))
    most = waits_s / min(slowest, left) + ERRORS * sqrt(noise) * then / left + step_s
    return Promise(min(then, MOST_S), min(least, MOST_S), min(most, MOST_S))


def _ttft(state: ModelState, work: Workload, counts: RoleCounts, then: Split, speed: float) -> Promise:
    """Return TTFT p95 in ms once the backlog is gone."""
    engine, error = state.engine, ERRORS * _error(state)
    prompt_ns, step_ns = _prompt_ns(state), engine.chunk_tokens / engine.chunk_speed
    # Images are encoded in a step of their own.
    further_ns = max(prompt_ns - state.prompt_encode_ns - step_ns, 0.0) + state.prompt_encode_ns

    def at(rate: float) -> float:
        busy = min(rate / (speed * _alone_share(state)), MOST_BUSY)
        queue_ns = prompt_ns * busy / (2 * (1 - busy)) * log(busy / TAIL) if busy > TAIL else 0.0
        return outlook(engine, replace(work, waiting_ns=queue_ns), then, counts.lending).ttft_ns + further_ns

    rate = state.arrival_rate
    least_ns = min(prompt_ns, at(rate * max(1 - error, 0.0)))
    # A prompt that arrives within a step waits for its end.
    most_ns = at(rate * (1 + error)) + step_ns
    then_ns = at(rate) + step_ns / 2
    return Promise(min(then_ns, MAX_NS) / 1e6, least_ns / 1e6, min(most_ns, MAX_NS) / 1e6)


def _prompt_ns(state: ModelState) -> float:
    """Return the time that a typical prompt with its images takes one worker by itself.

    If the prompt's length is unknown, one chunk is assumed.
    """
    tokens = state.prompt_tokens or float(state.engine.chunk_tokens)
    chunks_ns = state.engine.step_time.chunks_ns(round(tokens), round(tokens * tokens))
    return max(chunks_ns + state.prompt_encode_ns, 1.0)


def _alone_share(state: ModelState) -> float:
    """Return the speed of prompts that arrive one at a time, as a share of the speed in full steps.

    Without a queue a step has one prompt, which does not fill it but takes its whole fixed time.
    """
    tokens = state.prompt_tokens or float(state.engine.chunk_tokens)
    together_ns = tokens / state.engine.speed_at(tokens) + state.prompt_encode_ns
    return min(together_ns / _prompt_ns(state), 1.0)


def _error(state: ModelState) -> float:
    return max(state.arrival_error, LEAST_ERROR / ERRORS)
