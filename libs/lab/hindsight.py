"""The split of workers that turns out best in hindsight."""

from collections.abc import Callable

from libs.lab.experiment import Experiment, LabReport

Try = Callable[[int], LabReport]
"""Run the experiment with the given number of prefill workers."""


def merit(report: LabReport) -> tuple[float, float, float]:
    """Return a sort key, larger being better: the lesser of requests and work, then requests, then a short TTFT."""
    score = report.score
    return min(score.slo_attainment, score.work_attainment), score.slo_attainment, -score.ttft_s.get("p90", 0.0)


def first_guess(experiment: Experiment) -> int:
    """Return the number of prefill workers by their share of the work, leaving at least one worker on each side."""
    work, workers = experiment.work, experiment.workers
    prefill = sum(work.prompt_ns(each.input_tokens) for each in experiment.trace.requests)
    whole = sum(work.ns(each.input_tokens, each.output_tokens) for each in experiment.trace.requests)
    return min(max(round(workers * prefill / max(whole, 1.0)), 1), workers - 1)


def best_split(workers: int, guess: int, attempt: Try) -> LabReport:
    """Climb from the guess one worker at a time, past at most one step that does not improve."""
    tried: dict[int, LabReport] = {}

    def at(prefill: int) -> LabReport:
        if prefill not in tried:
            tried[prefill] = attempt(prefill)
        return tried[prefill]

    best = guess
    at(best)
    for step in (1, -1):
        here, misses = best, 0
        while 1 <= here + step < workers and misses < 2:
            here += step
            if merit(at(here)) > merit(at(best)):
                best, misses = here, 0
            else:
                misses += 1
    return at(best)
