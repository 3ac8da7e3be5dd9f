"""The effect of a change of roles, found by running the surrounding demand in virtual time with and without the change.

Roles stay fixed apart from the change, so that the two runs differ by nothing else. Both runs begin `LEAD_S` before it
with an empty cluster, and so lack earlier queues.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.run import PlannedMove
from libs.lab.experiment import Experiment, run
from libs.lab.policies import Policy
from libs.lab.slo import is_good, quantiles
from libs.lab.traces.request import Trace
from libs.policy.roles import Role

LEAD_S: Final = 10.0
"""The seconds of demand before the change that fill the cluster."""
AFTER_S: Final = 10.0
"""The seconds of demand after the change that are compared."""
SAME: Final = 0.01
"""The relative difference in TTFT below which two runs count as equal."""


@dataclass(frozen=True, slots=True)
class RoleAndBudget:
    """The role and prompt budget of one worker."""

    role: Role
    budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestResults:
    """Results of the requests that waited at the change, or arrived within `AFTER_S` of it."""

    requests: int
    good: float
    """The share of requests that met their SLO."""
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """The results of the same demand without and with the change."""

    without: RequestResults
    with_it: RequestResults

    @property
    def useful(self) -> bool:
        """Return whether the change helped: more requests in time, or equally many and an earlier first token."""
        if self.without.good != self.with_it.good:
            return self.without.good < self.with_it.good
        without, with_it = (each.ttft_ms.get("mean", 0.0) for each in (self.without, self.with_it))
        return without > with_it * (1 + SAME)


def counterfactual(
    experiment: Experiment, standing: Sequence[RoleAndBudget], changes: Mapping[int, RoleAndBudget], at_s: float
) -> Counterfactual:
    """Compare the demand around a change of roles with and without the change.

    `experiment` holds the whole demand, in a trace that begins at 0 s. `standing` is each worker's role before the
    change at `at_s`, and `changes` holds the new roles by worker. Raise InvalidRequest if no request waited at the
    change or arrived after it.
    """
    begin_s = max(at_s - LEAD_S, 0.0)
    around = replace(experiment, trace=_between(experiment.trace, begin_s, at_s + AFTER_S), workers=len(standing))
    moves = tuple(PlannedMove(at_s - begin_s, index, to.role, to.budget_tokens) for index, to in changes.items())
    roles = [(each.role, each.budget_tokens) for each in standing]
    policy = Policy("as it stood", lambda _: list(roles))
    after_ns = round((at_s - begin_s) * 1e9)
    without, with_it = (run(replace(around, moves=each), policy)[1].answers for each in ((), moves))
    # Both runs are identical up to the change, which cannot affect requests with an earlier first token.
    numbers = _open_at(without, after_ns)
    if not numbers:
        raise InvalidRequest("no request waited at the decision, and none came after it")
    return Counterfactual(_results(without, numbers), _results(with_it, numbers))


def _between(trace: Trace, begin_s: float, end_s: float) -> Trace:
    begin_ns = round(begin_s * 1e9)
    kept = [each for each in trace.requests if begin_ns <= each.arrival_ns < end_s * 1e9]
    if not kept:
        raise InvalidRequest("no request is known of the time around the decision")
    return replace(
        trace,
        requests=tuple(
            replace(each, number=number, arrival_ns=each.arrival_ns - begin_ns) for number, each in enumerate(kept)
        ),
    )


def _open_at(answers: Sequence[LabAnswer], after_ns: int) -> frozenset[int]:
    """Return the numbers of the requests without a first token at that time."""
    return frozenset(
        each.request.number
        for each in answers
        if each.outcome is not LabOutcome.COMPLETED or each.request.arrival_ns + each.ttft_ns >= after_ns
    )


def _results(answers: Sequence[LabAnswer], numbers: frozenset[int]) -> RequestResults:
    counted = [each for each in answers if each.request.number in numbers]
    done = [each for each in counted if each.outcome is LabOutcome.COMPLETED]
    return RequestResults(
        len(counted),
        sum(map(is_good, counted)) / len(counted),
        quantiles(each.ttft_ns / 1e6 for each in done),
        quantiles(each.tpot_ns / 1e6 for each in done if each.tpot_ns),
    )
