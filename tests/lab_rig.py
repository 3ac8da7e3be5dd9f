"""A small lab cluster and traces drawn for it, for tests that compare two ways to compute a run."""

from typing import Any

from hypothesis import strategies as st

from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.run import LabResult
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.step_time import StepTimeModel

MS = 1_000_000
BLOCK = 16
MODEL = StepTimeModel(2e6, 20_000, 0.7, 5e6, 31_000, 53.0, 0.3)


def requests(most_gap_ms: int) -> Any:
    """Draw up to 25 requests, in the form of `trace_of`."""
    return st.lists(
        st.tuples(
            st.integers(0, most_gap_ms),  # ms after the one before
            st.integers(1, 700),  # prompt tokens
            st.integers(1, 120),  # output tokens
            st.integers(0, 3),  # prefix
        ),
        min_size=1,
        max_size=25,
    )


def trace_of(drawn: list[tuple[int, int, int, int]]) -> Trace:
    """Build a trace; requests of one prefix share its first blocks."""
    found, at_ms = [], 0
    for number, (gap_ms, prompt, output, prefix) in enumerate(drawn):
        at_ms += gap_ms
        shared = prefix * 4
        ids = [prefix * 1000 + place if place < shared else 10_000 + 100 * number + place for place in range(60)]
        found.append(TraceRequest(number, at_ms * MS, prompt, output, ids[: -(-prompt // BLOCK)], output + 40))
    return Trace("drawn", found, BLOCK)


def shape(kv_blocks: int, *, guard: bool = True, stepwise: bool = False) -> WorkerShape:
    """Return the shape of each worker."""
    return WorkerShape("m", MODEL, BLOCK, kv_blocks, BLOCK * 1000, 8, 256, 1e8, MS, guard, stepwise=stepwise)


def figures(result: LabResult) -> Any:
    """Return all figures in which two runs can differ."""
    answers = [
        (each.outcome, each.first_ps, each.last_ps, each.tokens, each.late, each.cached_tokens)
        for each in result.answers
    ]
    return answers, result.spent, [worker.counts for worker in result.workers], result.virtual_ps
