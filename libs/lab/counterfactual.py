"""What a change of roles brought: the demand around it, through the cluster in virtual time with it and without it.

Roles stand still but for the change, so that the two runs differ by it alone. The runs begin `LEAD_S` before it, with
an empty cluster: what had queued up earlier is missing in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.run import PlannedMove
from libs.lab.experiment import Experiment, run
from libs.lab.policies import Policy
from libs.lab.score import is_good, quantiles
from libs.lab.traces.request import Trace
from libs.policy.roles import Role

LEAD_S: Final = 10.0
"""Demand before the change, that fills the cluster."""
AFTER_S: Final = 10.0
"""Demand after it, by which the two are compared."""
SAME: Final = 0.01
"""Share by which TTFT has to differ: less says nothing."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker's role."""

    role: Role
    budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lived:
    """What requests met that waited at the change, or came within `AFTER_S` of it."""

    requests: int
    good: float
    """Share that was in time."""
    ttft_ms: Mapping[str, float]
    tpot_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Two lives of one demand."""

    without: Lived
    with_it: Lived

    @property
    def useful(self) -> bool:
        """Whether things are worse without it: fewer requests in time, or as many and a later first token."""
        if self.without.good != self.with_it.good:
            return self.without.good < self.with_it.good
        without, with_it = (each.ttft_ms.get("mean", 0.0) for each in (self.without, self.with_it))
        return without > with_it * (1 + SAME)


def counterfactual(
    experiment: Experiment, standing: Sequence[Standing], changes: Mapping[int, Standing], at_s: float
) -> Counterfactual:
    """`experiment`: with the whole demand, its trace beginning at 0 s. `standing`: each worker's role before the
    change, at `at_s`; `changes`: roles by worker after it. Raises InvalidRequest where no request waited or came."""
    begin_s = max(at_s - LEAD_S, 0.0)
    around = replace(experiment, trace=_between(experiment.trace, begin_s, at_s + AFTER_S), workers=len(standing))
    moves = tuple(PlannedMove(at_s - begin_s, index, to.role, to.budget_tokens) for index, to in changes.items())
    roles = [(each.role, each.budget_tokens) for each in standing]
    policy = Policy("as it stood", lambda _: list(roles))
    after_ns = round((at_s - begin_s) * 1e9)
    without, with_it = (run(replace(around, moves=each), policy)[1].answers for each in ((), moves))
    # Until the change the two are one: whoever had a first token by then it can neither help nor hurt.
    numbers = _open_at(without, after_ns)
    if not numbers:
        raise InvalidRequest("no request waited at the decision, and none came after it")
    return Counterfactual(_lived(without, numbers), _lived(with_it, numbers))


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
    """Numbers of requests that had no first token by then."""
    return frozenset(
        each.request.number
        for each in answers
        if each.outcome is not LabOutcome.COMPLETED or each.request.arrival_ns + each.ttft_ns >= after_ns
    )


def _lived(answers: Sequence[LabAnswer], numbers: frozenset[int]) -> Lived:
    counted = [each for each in answers if each.request.number in numbers]
    done = [each for each in counted if each.outcome is LabOutcome.COMPLETED]
    return Lived(
        len(counted),
        sum(map(is_good, counted)) / len(counted),
        quantiles(each.ttft_ns / 1e6 for each in done),
        quantiles(each.tpot_ns / 1e6 for each in done if each.tpot_ns),
    )
