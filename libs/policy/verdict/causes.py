"""The causes that hold up a model's requests at a moment, the gravest first.

A slow worker or slow link comes before a shortage that would not exist without it. Neither is accused of delays that a
worker waiting for a CPU may explain.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from libs.policy.pressure import Split
from libs.policy.roles import Role
from libs.policy.verdict.advice import Action, advice, stands
from libs.policy.verdict.state import (
    CLEAR_DECODES,
    CLEAR_PRESSURE,
    LEAST_WAIT_S,
    QUEUED_S,
    Grade,
    ModelState,
    Pressures,
    Promise,
    PromisedFigure,
    UnknownState,
    VerdictLimits,
    WorkerState,
    fewest_workers,
    least_pressed,
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
    SHORT_OF_CPU = "short_of_cpu"
    TOO_SMALL = "too_small"
    REFUSED = "refused"
    LATE = "late"
    UNKNOWN = "unknown"


# Other roles of the same workers would end these.
IMBALANCES = frozenset((CauseCode.PREFILL_BOUND, CauseCode.DECODE_BOUND_TPOT, CauseCode.DECODE_BOUND_KV))
# A model has one of these at a time.
SHORTAGES = IMBALANCES | {CauseCode.TOO_SMALL}


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why requests are held up."""

    code: CauseCode
    model: str
    sentence: str
    workers: tuple[str, ...] = ()
    """The slow or silent workers, those behind a slow link, or those that wait for a CPU."""
    action: Action | None = None
    since_ns: int = 0
    grade: Grade = Grade.FIRE
    rank: int = 0
    """Sort key of causes; the smallest comes first."""
    missing_workers: int = 0
    """The number of workers to add to a cluster that is too small; 0 if no number considered suffices."""
    is_slight: bool = False
    """True if the pressure exceeds the threshold by so little that chance may explain it."""

    def seen(self, since_ns: int) -> "Cause":
        """Return the cause with the time since which it has held."""
        return replace(self, since_ns=since_ns)


# Without workers for a phase, its pressure is unbounded.
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
    """Format a backlog: "90k prompt tokens wait, 12 s of work against a TTFT target of 5 s"."""
    work_s = f"{state.backlog_s:.0f}" if state.backlog_s >= 10 else f"{state.backlog_s:.1f}"
    waiting = f"{amount(state.waiting_tokens)} prompt tokens wait"
    return f"{waiting}, {work_s} s of work against a TTFT target of {state.ttft_ns / 1e9:g} s"


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


# A wait that explains no accusation only adds to the pressure, so it comes after all other causes of a model.
SHORT_OF_CPU_RANK: Final = 3
LONG_QUEUE: Final = 0.5
"""The wait per prefill worker, as a share of the TTFT target, from which a prompt pressure is never slight."""
# The share of kept promises below which advice of that kind carries a warning.
LEAST_KEPT: Final = 0.7
COMMAND_NS: Final = 10_000_000_000
"""The time for which a new command is kept while it helps, so that people can type it."""
SMALL_NS: Final = 2_000_000_000
"""The time for which one phase must be short before a cluster is named too small, unless it is far too small. A burst
looks like a lasting rate at first, for which a change of roles is right.
"""
FAR_TOO_SMALL: Final = 2.0
"""The pressure in the best roles from which a cluster is too small at once."""
# The share of prefill time from which encoding images is mentioned.
MUCH_ENCODE: Final = 0.1
# The number of missing workers changes only once this share of it suffices.
FEWER: Final = 0.7


def causes(state: ModelState, limits: VerdictLimits, now_ns: int = 0, named: Cause | None = None) -> list[Cause]:
    """Return the causes that hold, and those between their thresholds, which keep a named cause alive.

    `named` is the model's currently named shortage. Its action and its number of missing workers are kept while they
    are true. A cluster named too small stays so until some split of roles would leave room.
    """
    found = [*_links(state, limits), *_slow(state, limits)]
    shortage = _shortage(state, limits, now_ns, named)
    if shortage is not None:
        found.append(shortage)
    found.extend(_short_of_cpu(state, limits, pressed=shortage is not None))
    return sorted(found, key=lambda each: (each.rank, each.code))


def shortage_of(
    pressures: Pressures, waits_s: float, limits: VerdictLimits, *, small: bool = False, lasts: bool = True
) -> tuple[CauseCode, Grade] | None:
    """Return the present shortage and its grade. Prompts count as a shortage only if some wait.

    `small` means that the cluster is already named too small, `lasts` that a shortage has been named for `SMALL_NS`.
    """
    grades = _phase_grades(pressures, waits_s, limits)
    sizes = {
        CauseCode.PREFILL_BOUND: pressures.prefill,
        CauseCode.DECODE_BOUND_TPOT: pressures.batch,
        CauseCode.DECODE_BOUND_KV: pressures.kv,
    }
    worst = max(grades, key=lambda code: (grades[code], sizes[code]))
    if grades[worst] is Grade.CLEAR:
        return None
    room = limits.pressure.clear if small else limits.pressure.fire
    both = min(pressures.prefill, pressures.decode) > limits.pressure.clear
    sure = small or both or lasts or pressures.cluster >= FAR_TOO_SMALL
    if grades[worst] is Grade.FIRE and pressures.cluster > room and sure:
        return CauseCode.TOO_SMALL, Grade.FIRE
    return worst, grades[worst]


def _phase_grades(pressures: Pressures, waits_s: float, limits: VerdictLimits) -> dict[CauseCode, Grade]:
    return {
        CauseCode.PREFILL_BOUND: _prompts_grade(pressures.prefill, waits_s, limits),
        CauseCode.DECODE_BOUND_TPOT: limits.pressure.grade(pressures.batch),
        CauseCode.DECODE_BOUND_KV: limits.pressure.grade(pressures.kv),
    }


def _grade_now(code: CauseCode, state: ModelState, limits: VerdictLimits) -> Grade:
    """Return the grade of one shortage, even if another is worse."""
    grades = _phase_grades(state.pressures, state.backlog_s, limits)
    if code is CauseCode.TOO_SMALL:
        return min(max(grades.values()), limits.pressure.grade(state.pressures.cluster))
    return grades[code]


def _prompts_grade(pressure: float, waits_s: float, limits: VerdictLimits) -> Grade:
    # Arrivals come in clusters, so a pressure just above 1 is a shortage only once a queue shows it.
    if waits_s < LEAST_WAIT_S:
        return Grade.CLEAR
    grade = limits.pressure.grade(pressure)
    if grade is Grade.FIRE and pressure < CLEAR_PRESSURE and waits_s < QUEUED_S:
        return Grade.HOLD
    return grade


def _is_slight(code: CauseCode, state: ModelState) -> bool:
    """Return whether chance may explain a shortage of one phase."""
    if code is CauseCode.PREFILL_BOUND:
        # If workers keep up, a burst leaves no queue as long as half of the target.
        long = state.backlog_s >= LONG_QUEUE * state.ttft_ns / 1e9
        return state.pressures.prefill < CLEAR_PRESSURE and not long
    return code in IMBALANCES and state.pressures.decode < CLEAR_DECODES


def _shortage(state: ModelState, limits: VerdictLimits, now_ns: int, named: Cause | None) -> Cause | None:
    small = named is not None and named.code is CauseCode.TOO_SMALL
    lasts = named is not None and now_ns - named.since_ns >= SMALL_NS
    found = shortage_of(state.pressures, state.backlog_s, limits, small=small, lasts=lasts)
    if found is None:
        return None
    code, grade = found
    healthy = shortage_of(state.healthy, state.backlog_s, limits)
    explained = healthy is None or healthy[1] is not Grade.FIRE
    slight = _is_slight(code, state)
    cause = Cause(code, state.model, "", grade=grade, rank=2 if explained else 0, is_slight=slight)
    same = named if named is not None and named.code is code else None
    standing = None if named is None else named.action
    if grade is Grade.FIRE:
        is_new = standing is not None and now_ns - standing.since_ns < COMMAND_NS
        action = advice(state, standing, is_new=is_new)
    else:
        action = None if standing is None else stands(state, standing)
    return _with_figures(cause, state, action, same)


def restated(named: Cause, state: ModelState, limits: VerdictLimits, *, advised: bool) -> Cause:
    """Return a named shortage with current figures, whether or not it still holds."""
    # Another shortage may be worse while this one still grows; it does not ease then.
    grade = _grade_now(named.code, state, limits)
    action = stands(state, named.action) if advised and named.action is not None else None
    return _with_figures(replace(named, grade=grade), state, action, named)


def _with_figures(cause: Cause, state: ModelState, action: Action | None, named: Cause | None) -> Cause:
    """Return the cause with its action and a sentence based on the same figures."""
    missing = _missing_workers(state, named) if cause.code is CauseCode.TOO_SMALL else 0
    cause = replace(cause, action=action, missing_workers=missing)
    return replace(cause, sentence=_said(cause, state))


def _missing_workers(state: ModelState, named: Cause | None) -> int:
    there = state.standing.workers
    needed = fewest_workers(state.engine, state.work, there, there * MOST_ADDED)
    missing, before = 0 if needed is None else needed - there, 0 if named is None else named.missing_workers
    # In an overload the number changes from moment to moment, and nobody can add workers that quickly.
    enough = before and least_pressed(state.engine, state.work, there + before).pressure <= 1
    return before if enough and missing > before * FEWER else missing


def _links(state: ModelState, limits: VerdictLimits) -> Iterator[Cause]:
    """Yield one cause for all workers behind slow links."""
    accused = _accusable(limits, _sources(state))
    graded = [(min(_link_grade(each, limits), accused, _accusable(limits, [each])), each) for each in state.workers]
    grade = max((grade for grade, _ in graded), default=Grade.CLEAR)
    if grade is Grade.CLEAR:
        return
    behind = sorted((each for own, each in graded if own is grade), key=lambda each: -each.kv_awaited)
    worst = behind[0]
    held = sum(each.held_by_link for each in behind)
    more = f", which holds up {amount(held)} sequence{'' if round(held) == 1 else 's'}" if held >= 1 else ""
    share = max(worst.kv_awaited, worst.kv_wait)
    alone = len(behind) == 1
    sentence = (
        f"Slow link: {'' if alone else 'up to '}{share:.0%} of the time, {listed([each.id for each in behind])} "
        f"{'waits' if alone else 'wait'} for KV that is ready at its source{more}. Check the network from "
        f"{listed([each.id for each in _sources(state)]) or 'the prefill workers'}."
    )
    yield Cause(CauseCode.SLOW_LINK, state.model, sentence, tuple(each.id for each in behind), grade=grade, rank=1)


def silences(state: ModelState | UnknownState) -> Iterator[Cause]:
    """Yield one cause for all silent workers, whatever else is known about the model.

    It comes first, because everything else is judged without these workers.
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
        f"and {'its' if alone else 'their'} requests wait or are sent again. Check "
        f"{'its process and machine' if alone else 'their processes and machines'}."
    )
    yield Cause(CauseCode.SILENT_WORKER, state.model, sentence, tuple(each.id for each in silent), rank=-1)


def _sources(state: ModelState) -> list[WorkerState]:
    return [each for each in state.workers if each.role is Role.PREFILL]


def _link_grade(worker: WorkerState, limits: VerdictLimits) -> Grade:
    """Grade a worker's link by how often and how long it waits for ready KV."""
    often = max(limits.kv_wait.grade(worker.kv_wait), limits.kv_awaited.grade(worker.kv_awaited))
    return min(often, limits.kv_awaited_s.grade(worker.kv_awaited_s))


def _accusable(limits: VerdictLimits, workers: Sequence[WorkerState]) -> Grade:
    """Return the gravest possible grade of an accusation that rests on the times of these workers.

    One of them that waits for a CPU is enough to explain a delay.
    """
    waits = max((limits.cpu_wait.grade(each.cpu_wait or 0.0) for each in workers), default=Grade.CLEAR)
    return Grade(Grade.FIRE - waits)


def _short_of_cpu(state: ModelState, limits: VerdictLimits, *, pressed: bool) -> Iterator[Cause]:
    """Yield one cause for all workers that wait for a CPU, if that holds up requests.

    It does if it explains a slow worker or slow link, or if there is more work than room (`pressed`).
    """
    behind = [each for each in state.workers if _link_grade(each, limits) is Grade.FIRE]
    late = [each for each in state.workers if limits.slowness.grade(each.slowness or 0.0) is Grade.FIRE]
    late += behind + (_sources(state) if behind else [])
    graded = [(limits.cpu_wait.grade(each.cpu_wait or 0.0), each) for each in (state.workers if pressed else late)]
    grade = max((grade for grade, _ in graded), default=Grade.CLEAR)
    short = {each.id: each for own, each in graded if own is grade}
    if grade is Grade.CLEAR:
        return
    names, alone = sorted(short, key=lambda name: -(short[name].cpu_wait or 0.0)), len(short) == 1
    sentence = (
        f"Short of CPU: {'worker' if alone else 'workers'} {listed(names)} {'waits' if alone else 'wait'} for a CPU "
        f"{'' if alone else 'up to '}{short[names[0]].cpu_wait or 0.0:.0%} of the time; "
        f"{'its host has' if alone else 'their hosts have'} too few cores for what runs there, or "
        f"{'its CPU limit is' if alone else 'their CPU limits are'} too low. Add cores, or move other work away."
    )
    rank = 1 if any(each in late for each in short.values()) else SHORT_OF_CPU_RANK
    yield Cause(CauseCode.SHORT_OF_CPU, state.model, sentence, tuple(names), grade=grade, rank=rank)


def _slow(state: ModelState, limits: VerdictLimits) -> Iterator[Cause]:
    """Yield one cause for all slow workers; if most are slow, their peers are no measure."""
    known = [each for each in state.workers if each.slowness is not None]
    graded = [(min(limits.slowness.grade(each.slowness or 0.0), _accusable(limits, [each])), each) for each in known]
    grade = max((grade for grade, _ in graded), default=Grade.CLEAR)
    slow = [each for own, each in graded if own is grade]
    if grade is Grade.CLEAR or 2 * len(slow) > len(known):
        return
    slow.sort(key=lambda each: -(each.slowness or 0.0))
    names, alone = [each.id for each in slow], len(slow) == 1
    which = listed([f"{each.id} ({each.takes})" for each in slow])
    out = shlex.join(("fulcrum", "role", names[0], "standby"))
    sentence = (
        f"Slow worker{'' if alone else 's'}: steps of {which} take {'' if alone else 'up to '}"
        f"{slow[0].slowness:.1f} times as long as on other workers. Check "
        f"{'its machine' if alone else 'their machines'}, or take {'it' if alone else 'the first'} out with `{out}`."
    )
    yield Cause(CauseCode.SLOW_WORKER, state.model, sentence, tuple(each.id for each in slow), grade=grade, rank=1)


def _said(cause: Cause, state: ModelState) -> str:
    found, code, action = state.pressures, cause.code, cause.action
    # Below its threshold a cause is named for a little longer, to prevent flickering.
    easing = "" if cause.grade is Grade.FIRE else ", easing"
    on_prefill, on_decode = workers(state.prefill, "prefill"), workers(state.mixed, "decode")
    # Another model, or smaller images, may help more than other roles.
    images = f"; images take {state.encode_share:.0%} of prefill's time" if state.encode_share >= MUCH_ENCODE else ""
    if state.roles_fixed:
        on_prefill = on_decode = workers(state.mixed, "mixed")
    # An acting planner chooses the moment of its moves, so a prediction of another move would contradict it.
    then = "" if action is None or state.acts else _then(action, state)
    if code is CauseCode.TOO_SMALL:
        now = Split(state.prefill, state.mixed, found.prefill, found.decode)
        slows = found.least.pressure < now.pressure and found.least.cost >= now.cost
        best = (
            f"The best roles would leave about {figure(found.cluster)}, but slow running answers too much"
            if slows
            else f"No other roles would leave a pressure below about {figure(found.cluster)}"
        )
        more = f"; {workers(cause.missing_workers, 'more')} would suffice" if cause.missing_workers else ""
        if state.roles_fixed:
            return (
                f"Too small{easing}: prefill pressure {figure(found.prefill)} and decode pressure "
                f"{figure(found.decode)} on {on_decode}, {backlog(state)}{images}{more}."
            )
        return (
            f"Too small{easing}: pressure {figure(found.prefill)} on {on_prefill} and {figure(found.decode)} on "
            f"{on_decode}, {backlog(state)}{images}. {best}{more}.{then}"
        )
    if code is CauseCode.PREFILL_BOUND:
        return (
            f"Prefill-bound{easing}: pressure {figure(found.prefill)} on {on_prefill} against {figure(found.decode)} "
            f"on {on_decode}, {backlog(state)}{images}.{then}"
        )
    against = f"against {figure(found.prefill)} on {on_prefill}"
    if code is CauseCode.DECODE_BOUND_KV:
        return (
            f"Decode-bound by KV{easing}: pressure {figure(found.kv)} on {on_decode} {against}, sequences need "
            f"{amount(found.kv_tokens)} tokens of {amount(found.kv_room_tokens)}.{then}"
        )
    running = f"{found.sequences} sequence{'' if found.sequences == 1 else 's'}"
    return (
        f"Decode-bound by TPOT{easing}: pressure {figure(found.batch)} on {on_decode} {against}, {running}, "
        f"with room for {found.largest_batch} within a TPOT of {state.work.tpot_ns / 1e6:g} ms.{then}"
    )


def _then(action: Action, state: ModelState) -> str:
    """Return the sentence of an action's promises, with a warning if too few such promises were kept."""
    said = f" {_advised(action)} leaves a pressure of {promised(action)}"
    waiting, after = f"the {amount(state.waiting_tokens)} waiting prompt tokens", []
    if action.backlog_s is not None:
        after.append(f"{waiting} would be gone in {figures(action.backlog_s)} s")
    if action.ttft_ms is not None:
        after.append(f"TTFT p95 {'then ' if action.backlog_s else ''}under {_duration(action.ttft_ms.most)}")
    if action.tpot_ms is not None:
        after.append(f"TPOT p95 under {_duration(action.tpot_ms.most)}")
    return "; ".join([said, ", ".join(after)] if after else [said]) + "." + _unkept(action, state)


def figures(promise: Promise) -> str:
    """Format a range as "6 to 9", with one decimal below 10, or as one figure if both ends look the same."""
    least, most = (f"{each:.0f}" if each >= 10 else f"{each:.1f}" for each in (promise.least, promise.most))
    return least if least == most else f"{least} to {most}"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1_000:.1f} s"


_KEPT: Final = {
    PromisedFigure.PRESSURE: "left what was promised",
    PromisedFigure.BACKLOG: "worked off the backlog in the time promised",
    PromisedFigure.TTFT: "left the TTFT that was promised",
    PromisedFigure.TPOT: "left the TPOT that was promised",
}


def _unkept(action: Action, state: ModelState) -> str:
    """Return a warning for each figure with too few kept promises of this kind."""
    poor = [
        f" Of the last {margin.of} such moves {margin.kept} {_KEPT[figure]}."
        for figure in action.promises
        if (margin := state.margins.get((action.role, figure))) and margin.kept < margin.of * LEAST_KEPT
    ]
    return "".join(poor)


def _advised(action: Action) -> str:
    count, role = len(action.workers), action.role
    if role == "mixed":
        return f"Having {workers(count, 'decode')} compute prompts too"
    return f"Moving {workers(count, 'decode' if role == 'prefill' else 'prefill')} to {role}"
