"""The causes that hold up a model's requests at a moment, the gravest first, and the workers to move about it.

A slow worker or slow link comes before a shortage that would not exist without it.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from libs.policy.planner.role_planning import GAIN
from libs.policy.pressure import Split, prompt_speed, split
from libs.policy.roles import Role
from libs.policy.verdict.state import (
    CLEAR_PRESSURE,
    LEAST_WAIT_S,
    QUEUED_S,
    Grade,
    ModelState,
    Pressures,
    RoleCounts,
    UnknownState,
    VerdictLimits,
    WorkerState,
    fewest_workers,
    role_counts,
)


class CauseCode(StrEnum):
    """The kind of bottleneck of a cluster, or its absence."""

    IDLE = "idle"
    BALANCED = "balanced"
    PREFILL_BOUND = "prefill_bound"
    DECODE_BOUND_TPOT = "decode_bound_tpot"
    DECODE_BOUND_KV = "decode_bound_kv"
    SLOW_LINK = "slow_link"
    SLOW_WORKER = "slow_worker"
    SILENT_WORKER = "silent_worker"
    TOO_SMALL = "too_small"
    UNKNOWN = "unknown"


# Other roles of the same workers would end these.
IMBALANCES = frozenset((CauseCode.PREFILL_BOUND, CauseCode.DECODE_BOUND_TPOT, CauseCode.DECODE_BOUND_KV))
# A model has one of these at a time.
SHORTAGES = IMBALANCES | {CauseCode.TOO_SMALL}


@dataclass(frozen=True, slots=True)
class Action:
    """A change of role for some workers."""

    workers: tuple[str, ...]
    role: str
    budget_tokens: int
    """The prompt budget of role mixed."""
    pressure_then: float
    """The predicted pressure of the worse phase after the move."""
    # Prompts and decodes come and go while workers move, so a range is promised.
    pressure_range: tuple[float, float] = (0.0, 0.0)

    @property
    def command(self) -> str:
        """The command line that performs the action, quoted for a shell: a worker chooses its own id."""
        role = f"mixed:{self.budget_tokens}" if self.role == "mixed" else self.role
        return shlex.join(("fulcrum", "role", *self.workers, role))


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why requests are held up."""

    code: CauseCode
    model: str
    sentence: str
    workers: tuple[str, ...] = ()
    """The slow or silent workers, or those behind a slow link."""
    action: Action | None = None
    since_ns: int = 0
    grade: Grade = Grade.FIRE
    rank: int = 0
    """Sort key of causes; the smallest comes first."""

    def seen(self, since_ns: int) -> "Cause":
        """Return the cause with the time since which it has held."""
        return replace(self, since_ns=since_ns)


# The smallest move that leaves at most this pressure is preferred.
GOOD: Final = 0.9
# This many standard errors of the prompts' rate on either side hold in seven of eight cases.
ERRORS: Final = 1.5
# Sequences end and begin while workers move, so decode pressure is uncertain by this share.
DECODE_ERROR: Final = 0.1
LEAST_ERROR: Final = 0.1
"""The least relative error of the prompts' pressure, however steadily they arrive."""

_Tried = tuple[Sequence[WorkerState], Split]
"""Workers to move, and the split that results."""


def advice(state: ModelState) -> Action | None:
    """Return the smallest move that leaves at most `GOOD`, or else the one that leaves least.

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


def _split(state: ModelState, counts: RoleCounts) -> Split:
    """Return the split for these counts, in which slow workers count for less than one.

    While prompts wait, computing them faster brings proportionally more decodes.
    """
    work, engine, now = state.work, state.engine, role_counts(state.workers)
    served = min(prompt_speed(engine, work, now.prefill, now.mixed, now.lending), work.prompts)
    then = min(prompt_speed(engine, work, counts.prefill, counts.mixed, counts.lending), work.prompts)
    if 0 < served < then:
        more = then / served
        work = replace(work, decodes=round(work.decodes * more), kv_tokens=round(work.kv_tokens * more))
    return split(engine, work, counts.prefill, counts.mixed, lending=counts.lending)


def _least(state: ModelState, now: Split) -> _Tried | None:
    """Return the best move, searching the ones of fewest workers first."""
    near = sorted([*_to_prefill(state), *_to_decode(state)], key=lambda each: len(each[0]))
    found = next((each for each in near if each[1].pressure <= GOOD), None)
    found = found or min(near, key=lambda each: each[1].pressure, default=None)
    return found if found is not None and found[1].pressure < now.pressure * (1 - GAIN) else None


def _to_prefill(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of decode workers, adding one at a time, those with the least KV first; the last one stays."""
    order, counts = _cheapest(state.workers, Role.MIXED, lambda each: each.kv_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(
            counts.prefill + each.speed, counts.mixed - each.speed, counts.lending - each.speed * each.lends
        )
        yield order[: number + 1], _split(state, counts)


def _to_decode(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of prefill workers, adding one at a time, those with the fewest prompt tokens first."""
    order, counts = _cheapest(state.workers, Role.PREFILL, lambda each: each.prompt_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(counts.prefill - each.speed, counts.mixed + each.speed, counts.lending)
        yield order[: number + 1], _split(state, counts)


def _lent(state: ModelState) -> _Tried | None:
    """Return all decode workers as computing prompts too; None if they already do."""
    counts = role_counts(state.workers)
    chosen = [each for each in state.workers if each.role is Role.MIXED and not each.budget_tokens]
    return (chosen, _split(state, replace(counts, lending=counts.mixed))) if chosen else None


def _move(state: ModelState, chosen: Sequence[WorkerState], then: Split) -> Action:
    role = "prefill" if chosen[0].role is Role.MIXED else "decode"
    return _action(state, chosen, then, role, 0)


def _action(state: ModelState, chosen: Sequence[WorkerState], then: Split, role: str, budget_tokens: int) -> Action:
    """Return the action with the predicted pressure and its range."""
    share = max(ERRORS * state.prompts_error, LEAST_ERROR)
    least = max(then.prompt_pressure * max(1 - share, 0.0), then.decode_pressure * (1 - DECODE_ERROR))
    most = max(then.prompt_pressure * (1 + share), then.decode_pressure * (1 + DECODE_ERROR))
    ids = tuple(sorted(each.id for each in chosen))
    return Action(ids, role, budget_tokens, then.pressure, (least, most))


def _cheapest(workers: Sequence[WorkerState], role: Role, cost: Callable[[WorkerState], int]) -> list[WorkerState]:
    """Sort the workers of a role by `cost`, slow ones last."""
    own = [each for each in workers if each.role is role]
    return sorted(own, key=lambda each: ((each.slowness or 1.0) > 1 + GAIN * 2, cost(each), each.id))


# Without workers for a phase its pressure has no bound.
MOST: Final = 100.0
MAX_LISTED: Final = 4


def figure(pressure: float) -> str:
    """Format a pressure as 1.8 or "more than 100"."""
    return f"{pressure:.1f}" if pressure <= MOST else f"more than {MOST:.0f}"


def promised(action: Action) -> str:
    """Format the promised range as "0.7 to 0.9", or as 0.8 if both ends read alike."""
    least, most = (figure(each) for each in action.pressure_range)
    return least if least == most else f"{least} to {most}"


def amount(number: float) -> str:
    """Format a number as 7, 41k or 2.3M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f}{unit}"
    return f"{number:.0f}"


def backlog(state: ModelState) -> str:
    """Format what waits, as work and beside the target: "90k prompt tokens wait, 12 s of work for a TTFT of 5 s"."""
    work_s = f"{state.backlog_s:.0f}" if state.backlog_s >= 10 else f"{state.backlog_s:.1f}"
    waiting = f"{amount(state.waiting_tokens)} prompt tokens wait"
    return f"{waiting}, {work_s} s of work for a TTFT of {state.ttft_ns / 1e9:g} s"


def workers(count: int, role: str) -> str:
    """Format a count as "1 decode worker" or "2 decode workers"."""
    return f"{count} {role} worker{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Join names as "a", "a and b" or "a, b, c, d and 3 more"."""
    shown, more = list(names[:MAX_LISTED]), len(names) - MAX_LISTED
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


MOST_ADDED: Final = 4
"""The bound on the number of workers considered for a cluster that is too small, as a multiple of the present ones."""


def causes(state: ModelState, limits: VerdictLimits, *, small: bool = False) -> list[Cause]:
    """Return the causes that hold, and those between their thresholds, which keep a named cause alive.

    `small` says that the cluster is named too small now. It stays so until some roles would leave room.
    """
    found = [*_links(state, limits), *_slow(state, limits)]
    shortage = _shortage(state, limits, small=small)
    if shortage is not None:
        found.append(shortage)
    return sorted(found, key=lambda each: (each.rank, each.code))


def shortage_of(
    pressures: Pressures, waits_s: float, limits: VerdictLimits, *, small: bool = False
) -> tuple[CauseCode, Grade] | None:
    """Return the present shortage and its grade; prompts press only where some wait."""
    grades = {
        CauseCode.PREFILL_BOUND: _prompts_grade(pressures.prefill, waits_s, limits),
        CauseCode.DECODE_BOUND_TPOT: limits.pressure.grade(pressures.batch),
        CauseCode.DECODE_BOUND_KV: limits.pressure.grade(pressures.kv),
    }
    sizes = {
        CauseCode.PREFILL_BOUND: pressures.prefill,
        CauseCode.DECODE_BOUND_TPOT: pressures.batch,
        CauseCode.DECODE_BOUND_KV: pressures.kv,
    }
    worst = max(grades, key=lambda code: (grades[code], sizes[code]))
    if grades[worst] is Grade.CLEAR:
        return None
    room = limits.pressure.clear if small else limits.pressure.fire
    if grades[worst] is Grade.FIRE and pressures.cluster > room:
        return CauseCode.TOO_SMALL, Grade.FIRE
    return worst, grades[worst]


def _prompts_grade(pressure: float, waits_s: float, limits: VerdictLimits) -> Grade:
    # Arrivals come in clusters, so a pressure just above 1 is a shortage only once a queue shows it.
    if waits_s < LEAST_WAIT_S:
        return Grade.CLEAR
    grade = limits.pressure.grade(pressure)
    if grade is Grade.FIRE and pressure < CLEAR_PRESSURE and waits_s < QUEUED_S:
        return Grade.HOLD
    return grade


def _shortage(state: ModelState, limits: VerdictLimits, *, small: bool) -> Cause | None:
    found = shortage_of(state.pressures, state.backlog_s, limits, small=small)
    if found is None:
        return None
    code, grade = found
    healthy = shortage_of(state.healthy, state.backlog_s, limits)
    explained = healthy is None or healthy[1] is not Grade.FIRE
    action = advice(state) if grade is Grade.FIRE else None
    return Cause(code, state.model, _said(code, state, action), (), action, grade=grade, rank=2 if explained else 0)


def _links(state: ModelState, limits: VerdictLimits) -> Iterator[Cause]:
    """Yield one cause for all workers behind slow links."""
    graded = [(_link_grade(each, limits), each) for each in state.workers]
    grade = max((grade for grade, _ in graded), default=Grade.CLEAR)
    if grade is Grade.CLEAR:
        return
    behind = sorted((each for own, each in graded if own is grade), key=lambda each: -each.kv_awaited)
    worst = behind[0]
    held = sum(each.held_by_link for each in behind)
    more = f", for {amount(held)} sequences" if held >= 1 else ""
    share = max(worst.kv_awaited, worst.kv_wait)
    sentence = (
        f"Slow link: KV that is ready at its source is on its way to {listed([each.id for each in behind])} "
        f"{share:.0%} of the time{more}; look at the link from {listed(_sources(state)) or 'the prefill workers'}."
    )
    yield Cause(CauseCode.SLOW_LINK, state.model, sentence, tuple(each.id for each in behind), grade=grade, rank=1)


def silences(state: ModelState | UnknownState) -> Iterator[Cause]:
    """Yield one cause for all workers that should report and do not, whatever else is known of the model.

    It comes first, as everything else is judged without these workers.
    """
    silent = sorted(state.silent, key=lambda each: (-each.silent_s, each.id))
    if not silent:
        return
    longest, alone = silent[0], len(silent) == 1
    of = [
        f"{number} of {workers(whole, takes)}"
        for takes, whole in sorted(state.by_role.items())
        if (number := sum(each.takes == takes for each in silent))
    ]
    sentence = (
        f"Silent: {listed([each.id for each in silent])} {'has' if alone else 'have'} reported nothing for "
        f"{longest.silent_s:.1f} s{'' if alone else ' or less'}; {listed(of)} {'does' if alone else 'do'} not answer, "
        f"and {'its' if alone else 'their'} requests wait or are sent again; look at "
        f"{'its process or machine' if alone else 'their processes or machines'}."
    )
    yield Cause(CauseCode.SILENT_WORKER, state.model, sentence, tuple(each.id for each in silent), rank=-1)


def _sources(state: ModelState) -> list[str]:
    return [each.id for each in state.workers if each.role is Role.PREFILL]


def _link_grade(worker: WorkerState, limits: VerdictLimits) -> Grade:
    """Grade a worker's link by how often and how long it waits for ready KV."""
    often = max(limits.kv_wait.grade(worker.kv_wait), limits.kv_awaited.grade(worker.kv_awaited))
    return min(often, limits.kv_awaited_s.grade(worker.kv_awaited_s))


def _slow(state: ModelState, limits: VerdictLimits) -> Iterator[Cause]:
    """Yield one cause for all slow workers; if most are slow, their peers are no measure."""
    known = [each for each in state.workers if each.slowness is not None]
    graded = [(limits.slowness.grade(each.slowness or 0.0), each) for each in known]
    grade = max((grade for grade, _ in graded), default=Grade.CLEAR)
    slow = [each for own, each in graded if own is grade]
    if grade is Grade.CLEAR or 2 * len(slow) > len(known):
        return
    slow.sort(key=lambda each: -(each.slowness or 0.0))
    names, alone = [each.id for each in slow], len(slow) == 1
    which = listed([f"{each.id} ({each.takes})" for each in slow])
    sentence = (
        f"Slow worker: steps of {which} take {slow[0].slowness:.1f} times as long as the same steps take "
        f"{'its peers; look at its machine' if alone else 'their peers; look at their machines'}, or take "
        f"{'it' if alone else 'the first'} out: fulcrum role {names[0]} standby."
    )
    yield Cause(CauseCode.SLOW_WORKER, state.model, sentence, tuple(each.id for each in slow), grade=grade, rank=1)


def _said(code: CauseCode, state: ModelState, action: Action | None) -> str:
    found = state.pressures
    on_prefill, on_decode = workers(state.prefill, "prefill"), workers(state.mixed, "decode")
    then = "" if action is None else f" {_advised(action)} leaves {promised(action)}."
    if code is CauseCode.TOO_SMALL:
        most = state.standing.workers * MOST_ADDED
        needed = fewest_workers(state.engine, state.work, state.standing.workers, most)
        more = f"; {workers(needed - state.standing.workers, 'more')} would do" if needed else ""
        return (
            f"Too small: prompts press {figure(found.prefill)} on {on_prefill}, decodes {figure(found.decode)} on "
            f"{on_decode}, {backlog(state)}, and no other roles of them leave less than {figure(found.cluster)}{more}."
            f"{then}"
        )
    if code is CauseCode.PREFILL_BOUND:
        return (
            f"Prefill-bound: pressure {figure(found.prefill)} on {on_prefill} against {figure(found.decode)} on "
            f"{on_decode}, {backlog(state)}.{then}"
        )
    against = f"against {figure(found.prefill)} on {on_prefill}"
    if code is CauseCode.DECODE_BOUND_KV:
        return (
            f"Decode-bound by KV: pressure {figure(found.kv)} on {on_decode} {against}, sequences need "
            f"{amount(found.kv_tokens)} tokens of {amount(found.kv_room_tokens)}.{then}"
        )
    return (
        f"Decode-bound by TPOT: pressure {figure(found.batch)} on {on_decode} {against}, {found.sequences} sequences, "
        f"with room for {found.largest_batch} within a TPOT of {state.work.tpot_ns / 1e6:g} ms.{then}"
    )


def _advised(action: Action) -> str:
    count, role = len(action.workers), action.role
    if role == "mixed":
        return f"Having {workers(count, 'decode')} compute prompts too"
    return f"Moving {workers(count, 'decode' if role == 'prefill' else 'prefill')} to {role}"
