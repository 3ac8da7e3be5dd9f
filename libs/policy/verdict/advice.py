"""The role change that a verdict advises: its command, its predicted effect, and the time for which it is kept."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.policy.planner.role_planning import GAIN
from libs.policy.pressure import Split, Workload, most_prefill_by_link, prompt_speed, split
from libs.policy.roles import Role
from libs.policy.verdict.aftermath import aftermath, decodes_to_come
from libs.policy.verdict.state import (
    NO_MARGIN,
    ModelState,
    PodLabel,
    Promise,
    PromisedFigure,
    RoleCounts,
    WorkerState,
    role_counts,
)


@dataclass(frozen=True, slots=True)
class Action:
    """A change of role for some workers."""

    workers: tuple[str, ...]
    role: str
    budget_tokens: int
    """The prompt budget of workers with role mixed; 0 otherwise."""
    pressure_then: float
    """The predicted pressure of the worse phase after the move."""
    # Prompts and decodes come and go while workers move, so a range is promised.
    pressure_range: tuple[float, float] = (0.0, 0.0)
    backlog_s: Promise | None = None
    """The time until the waiting prompts are done; None if none wait, or if the backlog would remain."""
    ttft_ms: Promise | None = None
    """TTFT p95 of requests that arrive after that; None if a queue would remain."""
    tpot_ms: Promise | None = None
    """TPOT p95 of the same requests, if decode work exceeds capacity."""
    # Fields set by the watch, which tell an operator whether the command is still the same.
    id: str = ""
    since_ns: int = 0
    """The time since which this command has been advised."""
    replaces: str = ""
    """The command that preceded it for the same cause; empty for the first."""
    foreign: bool = False
    """True for observed servers, which get an `instruction` instead of a `command`."""
    pod_label: PodLabel | None = None

    @property
    def command(self) -> str:
        """The command line that performs the action, quoted for a shell because workers choose their own ids.

        Empty for observed servers.
        """
        if self.foreign:
            return ""
        role = f"mixed:{self.budget_tokens}" if self.role == "mixed" else self.role
        return shlex.join(("fulcrum", "role", *self.workers, role))

    @property
    def instruction(self) -> str:
        """The instruction for changing the router of observed servers; empty for others."""
        if not self.foreign:
            return ""
        servers = ", ".join(self.workers)
        if self.role == "mixed":
            return f"Have the router send prompts to {servers} too.{self._relabel('both')}"
        change = f"Have the router use {servers} for {self.role}; a server started as kv_both takes either role."
        return f"{change}{self._relabel(self.role)}"

    def _relabel(self, value: str) -> str:
        """Return the sentence with the command that changes the pods' label; empty if the servers are not pods."""
        label = self.pod_label
        if label is None:
            return ""
        words = ("kubectl", "--namespace", label.namespace, "label", "--overwrite", "pod", *self.workers)
        # A ReplicaSet that selects by the label releases the pod and starts another, which takes GPUs.
        return f" By label: {shlex.join((*words, f'{label.name}={value}'))} (not if their Deployment selects by it)."

    @property
    def promises(self) -> Mapping[PromisedFigure, Promise]:
        """Return the promised range of each figure; figures without one are absent."""
        found = {
            PromisedFigure.PRESSURE: Promise(self.pressure_then, *self.pressure_range),
            PromisedFigure.BACKLOG: self.backlog_s,
            PromisedFigure.TTFT: self.ttft_ms,
            PromisedFigure.TPOT: self.tpot_ms,
        }
        return {figure: promise for figure, promise in found.items() if promise is not None}


# The smallest move that leaves at most this pressure is preferred.
GOOD: Final = 0.9
# This many standard errors of the prompts' rate on either side cover seven of eight cases.
ERRORS: Final = 1.5
# Sequences end and begin while workers move, so decode pressure is uncertain by this share.
DECODE_ERROR: Final = 0.1
LEAST_ERROR: Final = 0.1
"""The minimum relative error of the prompts' pressure, however steadily they arrive."""

_Tried = tuple[Sequence[WorkerState], Split]
"""Workers to move, and the split that results."""


def advice(state: ModelState, standing: Action | None = None, *, is_new: bool = False) -> Action | None:
    """Return the change of roles to make now, or None if nothing helps.

    `standing` is the current advice. It is kept, with current figures, unless another change leaves clearly less
    pressure: a command that changes while somebody types it is useless. New advice is kept as long as it helps at all.
    """
    if state.roles_fixed:
        return None
    best, still = _best(state), None if standing is None else stands(state, standing)
    if still is None:
        return best
    if is_new:
        return still
    beaten = best is not None and still.pressure_then > 1 and best.pressure_then < still.pressure_then * (1 - GAIN)
    return best if beaten else still


def _relieves(now: Split, then: Split, share: float = 0.0) -> bool:
    """Return whether `then` lowers both pressure and cost by more than `share`.

    The planner compares splits by their cost. It would reverse a move that overloads decode instead of prefill.
    """
    return then.pressure < now.pressure * (1 - share) and then.cost < now.cost * (1 - share)


def stands(state: ModelState, standing: Action) -> Action | None:
    """Return the action with current figures, or None if it would not help or its workers have moved."""
    again = None if state.roles_fixed else _again(state, standing)
    if again is None:
        return None
    return replace(again, id=standing.id, since_ns=standing.since_ns, replaces=standing.replaces)


def _best(state: ModelState) -> Action | None:
    """Return the smallest move that leaves at most `GOOD`, or else the one that leaves the least.

    If no move relieves pressure by `GAIN`, decode workers may compute prompts too. None means that nothing helps.
    """
    now = _split(state, role_counts(state.workers))
    best = _least(state, now)
    if best is not None and best[1].pressure <= 1:
        return _move(state, *best)
    lent = _lent(state)
    if lent is not None and lent[1].pressure < (best[1] if best else now).pressure * (1 - GAIN):
        return _action(state, *lent, "mixed", state.engine.chunk_tokens)
    return _move(state, *best) if best is not None else None


def _again(state: ModelState, standing: Action) -> Action | None:
    """Return the action with current predictions; None if it would not help or cannot be carried out unchanged."""
    names, now = frozenset(standing.workers), _split(state, role_counts(state.workers))
    chosen = [each for each in state.workers if each.id in names]
    leaves = Role.PREFILL if standing.role == "decode" else Role.MIXED
    own = [each for each in state.workers if each.role is leaves]
    if len(chosen) < len(names) or any(each.role is not leaves for each in chosen):
        return None
    if standing.role == "mixed":
        lent = None if any(each.budget_tokens for each in chosen) else _lent(state)
        if lent is None or not _relieves(now, lent[1]):
            return None
        return _action(state, *lent, "mixed", state.engine.chunk_tokens)
    if len(own) == len(chosen):
        return None
    then = _split(state, _moved(role_counts(state.workers), chosen))
    return _move(state, chosen, then) if _relieves(now, then) else None


def _split(state: ModelState, counts: RoleCounts) -> Split:
    """Return the split for these counts, in which slow workers count for less than one."""
    work = _work_then(state, counts)
    return split(state.engine, work, counts.prefill, counts.mixed, lending=counts.lending)


def _work_then(state: ModelState, counts: RoleCounts) -> Workload:
    """Return the work for these counts.

    While prompts wait, computing them faster brings proportionally more decodes.
    """
    work, engine, now = state.work, state.engine, role_counts(state.workers)
    served = min(prompt_speed(engine, work, now.prefill, now.mixed, now.lending), work.prompts)
    then = min(prompt_speed(engine, work, counts.prefill, counts.mixed, counts.lending), work.prompts)
    if 0 < served < then:
        more = then / served
        work = replace(work, decodes=round(work.decodes * more), kv_tokens=round(work.kv_tokens * more))
    return work


def _least(state: ModelState, now: Split) -> _Tried | None:
    """Return the best move, searching moves of the fewest workers first."""
    near = sorted([*_to_prefill(state), *_to_decode(state)], key=lambda each: len(each[0]))
    helpful = [each for each in near if _relieves(now, each[1], GAIN)]
    found = next((each for each in helpful if each[1].pressure <= GOOD), None)
    return found or min(helpful, key=lambda each: each[1].cost, default=None)


def _to_prefill(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of decode workers, adding one at a time, those with the least KV first.

    At least one stays, and enough to receive the KV of all prompts.
    """
    order, counts = _cheapest(state.workers, Role.MIXED, lambda each: each.kv_tokens), role_counts(state.workers)
    fed = most_prefill_by_link(state.engine, state.work.prompts, counts.prefill + counts.mixed)
    for number, each in enumerate(order[:-1]):
        counts = _moved(counts, [each])
        if counts.prefill > fed:
            return
        yield order[: number + 1], _split(state, counts)


def _to_decode(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of prefill workers, adding one at a time, those with the fewest prompt tokens first."""
    order, counts = _cheapest(state.workers, Role.PREFILL, lambda each: each.prompt_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = _moved(counts, [each])
        yield order[: number + 1], _split(state, counts)


def _moved(counts: RoleCounts, workers: Iterable[WorkerState]) -> RoleCounts:
    """Return the counts after these workers have changed between prefill and decode."""
    for each in workers:
        to_prefill = each.speed if each.role is Role.MIXED else -each.speed
        lending = counts.lending - each.speed * each.lends
        counts = RoleCounts(counts.prefill + to_prefill, counts.mixed - to_prefill, lending)
    return counts


def _lent(state: ModelState) -> _Tried | None:
    """Return the change after which all decode workers compute prompts too, or None if they already do."""
    counts = role_counts(state.workers)
    chosen = [each for each in state.workers if each.role is Role.MIXED and not each.budget_tokens]
    return (chosen, _split(state, replace(counts, lending=counts.mixed))) if chosen else None


def _move(state: ModelState, chosen: Sequence[WorkerState], then: Split) -> Action:
    role = "prefill" if chosen[0].role is Role.MIXED else "decode"
    return _action(state, chosen, then, role, 0)


def _action(state: ModelState, chosen: Sequence[WorkerState], then: Split, role: str, budget_tokens: int) -> Action:
    """Return the action with the predicted figures, as ranges."""
    now, share = role_counts(state.workers), max(ERRORS * state.prompts_error, LEAST_ERROR)
    counts = replace(now, lending=now.mixed) if role == "mixed" else _moved(now, chosen)
    work = _work_then(state, counts)
    later = split(
        state.engine, decodes_to_come(state, work, counts), counts.prefill, counts.mixed, lending=counts.lending
    )
    least = max(then.prompt_pressure * max(1 - share, 0.0), then.decode_pressure * (1 - DECODE_ERROR))
    # Prompts that are computed sooner also decode sooner, which the promise covers.
    most_decode = max(then.decode_pressure, later.decode_pressure)
    most = max(then.prompt_pressure * (1 + share), most_decode * (1 + DECODE_ERROR))
    ids = tuple(sorted(each.id for each in chosen))
    found = {PromisedFigure.PRESSURE: Promise(then.pressure, least, most)}
    found |= aftermath(state, work, counts, then)
    widened = {
        figure: promise.widened(state.margins.get((role, figure), NO_MARGIN)) for figure, promise in found.items()
    }
    pressure = widened[PromisedFigure.PRESSURE]
    return Action(
        ids,
        role,
        budget_tokens,
        then.pressure,
        (pressure.least, pressure.most),
        widened.get(PromisedFigure.BACKLOG),
        widened.get(PromisedFigure.TTFT),
        widened.get(PromisedFigure.TPOT),
        foreign=state.foreign,
        pod_label=state.pod_label,
    )


def _cheapest(workers: Sequence[WorkerState], role: Role, cost: Callable[[WorkerState], int]) -> list[WorkerState]:
    """Sort the workers of a role by `cost`, slow ones last."""
    own = [each for each in workers if each.role is role]
    return sorted(own, key=lambda each: ((each.slowness or 1.0) > 1 + GAIN * 2, cost(each), each.id))
