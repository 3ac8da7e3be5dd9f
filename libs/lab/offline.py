"""The best schedule found by a search that knows the trace: the most that a planner could still gain.

The search covers roles over time and the set of refused requests. Order, binding and pacing are Fulcrum's live code,
and a run of the lab gives each schedule its value. The result is a lower bound of the best schedule, as `fluid_rate` is
an upper one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.run import PlannedMove
from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.policies import AUTO, MIXED, OFFLINE, policy_named
from libs.lab.search import WANTED, merit, passes
from libs.lab.slo import is_good
from libs.policy.roles import Role

RUNS: Final = 40
"""The number of schedules tried, each of which is one run of the lab."""
SEGMENT_S: Final = 5.0
MAX_SEGMENTS: Final = 24
CONSTANT_SHARES: Final = (0.0, 0.25, 0.4, 0.5, 0.65, 0.8)
"""The shares of workers in role prefill with which the search begins."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The roles of workers over time, and the requests that are refused."""

    prefill: tuple[int, ...]
    """The number of prefill workers in each of the trace's equally long segments; the others are mixed. If it is empty,
    the live planner moves workers.
    """
    refused: frozenset[int] = frozenset()
    """The numbers of the requests that are rejected on arrival."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A schedule together with the report and answers of its run."""

    schedule: Schedule
    report: LabReport
    answers: Sequence[LabAnswer]


def best_offline(experiment: Experiment, start: Schedule | None = None, *, runs: int = RUNS) -> Trial:
    """Return the best of `runs` schedules, stopping early at one that keeps the SLO for `WANTED` of requests and work.

    The search first tries the planner, constant splits, and roles by the work known to arrive. Then it changes the best
    schedule one step at a time: a stretch gets more or fewer prefill workers, or requests served in vain are refused.
    `start` is a schedule that was good at another rate.
    """
    chance = np.random.default_rng(experiment.seed)
    best: Trial | None = None
    tried: set[Schedule] = set()
    first = _first(experiment, start)
    for number in range(runs):
        if number < len(first):
            schedule = first[number]
        else:
            assert best is not None
            schedule = _changed(best, experiment, chance)
        if schedule in tried:
            continue
        tried.add(schedule)
        found = _try(experiment, schedule)
        if best is None or merit(found.report) > merit(best.report):
            best = found
        if passes([best.report]) >= WANTED:
            break
    assert best is not None
    return best


def _first(experiment: Experiment, start: Schedule | None) -> list[Schedule]:
    workers, segments = experiment.workers, _segments(experiment)
    constant = dict.fromkeys(min(round(share * workers), workers - 1) for share in CONSTANT_SHARES)
    known = _by_work(experiment, segments)
    begin = [Schedule(start.prefill)] if start is not None else []
    return [*begin, Schedule(()), Schedule(known), *(Schedule((each,) * segments) for each in constant)]


def _segments(experiment: Experiment) -> int:
    return max(min(round(experiment.trace.duration_ns / 1e9 / SEGMENT_S), MAX_SEGMENTS), 1)


def _by_work(experiment: Experiment, segments: int) -> tuple[int, ...]:
    """Return the prefill workers of each segment, by the share of prompts in the work that arrives in it."""
    work, workers = experiment.work, experiment.workers
    prompts, whole = [0.0] * segments, [0.0] * segments
    for request in experiment.trace.requests:
        place = min(int(request.arrival_ns / max(experiment.trace.duration_ns, 1) * segments), segments - 1)
        prompts[place] += work.prompt_ns(request.input_tokens)
        whole[place] += work.ns(request.input_tokens, request.output_tokens)
    shares = [part / all_of_it if all_of_it else 0.0 for part, all_of_it in zip(prompts, whole, strict=True)]
    return tuple(min(round(share * workers), workers - 1) for share in shares)


def _try(experiment: Experiment, schedule: Schedule) -> Trial:
    changed = replace(experiment, moves=_moves(experiment, schedule.prefill), refused=schedule.refused)
    name = AUTO if not schedule.prefill else MIXED
    report, result = run(changed, policy_named(name, experiment.workers))
    return Trial(schedule, replace(report, policy=OFFLINE), result.answers)


def _moves(experiment: Experiment, prefill: tuple[int, ...]) -> list[PlannedMove]:
    """Return the moves at the beginnings of segments. Workers with a low index prefill first."""
    moves, before = [], 0
    seconds, budget_tokens = experiment.trace.duration_ns / 1e9, experiment.speed.chunk_tokens
    for place, now in enumerate(prefill):
        at_s = seconds * place / len(prefill)
        moves += [PlannedMove(at_s, worker, Role.PREFILL, 0) for worker in range(before, now)]
        moves += [PlannedMove(at_s, worker, Role.MIXED, budget_tokens) for worker in range(now, before)]
        before = now
    return moves


def _changed(best: Trial, experiment: Experiment, chance: np.random.Generator) -> Schedule:
    """Return a random neighbour of the best schedule so far."""
    schedule, segments = best.schedule, _segments(experiment)
    if chance.random() < 1 / 3:
        return replace(schedule, refused=_in_vain(best, experiment))
    prefill = list(schedule.prefill or _by_work(experiment, segments))
    first = int(chance.integers(len(prefill)))
    last = min(first + int(chance.choice((1, 1, 2, 4, len(prefill)))), len(prefill))
    by = int(chance.choice((-2, -1, 1, 2)))
    for place in range(first, last):
        prefill[place] = min(max(prefill[place] + by, 0), experiment.workers - 1)
    return replace(schedule, prefill=tuple(prefill))


def _in_vain(best: Trial, experiment: Experiment) -> frozenset[int]:
    """Return the requests that missed their SLO, costliest first, as many as `WANTED` allows to lose."""
    work = experiment.work
    ideal = {
        each.request.number: work.ns(each.request.input_tokens, each.request.output_tokens) for each in best.answers
    }
    lost = [each.request.number for each in best.answers if not is_good(each)]
    lost.sort(key=lambda number: -ideal[number])
    left_requests, left_ns = (1 - WANTED) * len(ideal), (1 - WANTED) * sum(ideal.values())
    refused = set()
    for number in lost:
        if left_requests >= 1 and left_ns >= ideal[number]:
            refused.add(number)
            left_requests, left_ns = left_requests - 1, left_ns - ideal[number]
    return frozenset(refused)
