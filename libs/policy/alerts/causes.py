"""Alert conditions from the verdict: one alert for each cause, with the verdict's thresholds and words."""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from libs.policy.alerts.rules import Condition, Labels, Name
from libs.policy.alerts.snapshot import Snapshot
from libs.policy.grade import Grade
from libs.policy.verdict.cause import IMBALANCES, SHORTAGES, Cause, CauseCode

PHASES: Final = {
    CauseCode.PREFILL_BOUND: "prefill",
    CauseCode.DECODE_BOUND_TPOT: "decode",
    CauseCode.DECODE_BOUND_KV: "decode",
}
OVER: Final = "work presses no more than there is room for"


def cause_conditions(snapshot: Snapshot, followed: Collection[str]) -> Iterator[Condition]:
    """Yield conditions for every judged model; `followed` holds workers whose alerts may be firing."""
    for model in snapshot.judged:
        causes = [each for each in snapshot.causes if each.model == model]
        yield from _imbalances(model, causes)
        yield _one(Name.TOO_SMALL, model, [each for each in causes if each.code is CauseCode.TOO_SMALL], OVER)
        links = [each for each in causes if each.code is CauseCode.SLOW_LINK]
        yield _one(Name.KV_TRANSFER_BOUND, model, links, "KV that is ready comes as soon as it is awaited")
        yield from _slow_workers(model, causes, followed)


def is_explained(condition: Condition, causes: Sequence[Cause]) -> bool:
    """Return whether a growing queue or full KV cache is only a symptom of a named cause, which has its own alert."""
    model = dict(condition.labels).get("model")
    codes = {each.code for each in causes if each.model == model}
    if condition.name is Name.QUEUE_GROWING:
        return bool(codes)
    return condition.name is Name.KV_CACHE_FULL and bool(codes & SHORTAGES)


def _imbalances(model: str, causes: Sequence[Cause]) -> Iterator[Condition]:
    for phase in ("prefill", "decode"):
        found = [each for each in causes if each.code in IMBALANCES and PHASES[each.code] == phase]
        labels: Labels = (("model", model), ("phase", phase))
        yield _condition(Name.IMBALANCE, labels, found, OVER)


def _one(name: Name, model: str, causes: Sequence[Cause], over: str) -> Condition:
    return _condition(name, (("model", model),), causes, over)


def _condition(name: Name, labels: Labels, causes: Sequence[Cause], over: str) -> Condition:
    if not causes:
        return Condition(name, labels, Grade.CLEAR, over)
    action = causes[0].action
    command = action.command if action is not None else ""
    return Condition(name, labels, Grade.FIRE, causes[0].sentence, command=command)


def _slow_workers(model: str, causes: Sequence[Cause], followed: Collection[str]) -> Iterator[Condition]:
    slow = next((each for each in causes if each.code is CauseCode.SLOW_WORKER), None)
    named = slow.workers if slow is not None else ()
    for worker in dict.fromkeys([*named, *sorted(followed)]):
        grade = Grade.FIRE if worker in named else Grade.CLEAR
        reason = slow.sentence if slow is not None and worker in named else "its steps take no longer than its peers'"
        yield Condition(Name.SLOW_WORKER, (("model", model), ("worker", worker)), grade, reason)
