"""Verdicts over time: a cause is named once it has lasted and stays until it has been gone for some time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from libs.policy.verdict.advice import Action
from libs.policy.verdict.causes import SHORTAGES, Cause, CauseCode, causes, restated, silences
from libs.policy.verdict.promises import PromiseLog
from libs.policy.verdict.state import Grade, ModelState, UnknownState, VerdictLimits

# A cause may flicker around its threshold, so its advice is kept for this long after the cause last held.
ADVISED_NS = 1_000_000_000
_SHORTAGE = "shortage"
# These are recognised only after they have lasted, so they are named at once.
_SEEN_TO_LAST = frozenset((CauseCode.SLOW_WORKER, CauseCode.SILENT_WORKER))
LATE_CLEAR_NS = 1_000_000_000
"""The time for which late requests must be gone; their figures already cover several seconds."""
MAX_FOLLOWED = 256
"""The maximum number of causes tracked over all models; later ones are not named."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The causes, gravest first; without any, the state of the cluster: balanced, idle or unknown."""

    code: CauseCode
    model: str
    """The model that the verdict is about; empty if there is none."""
    sentence: str
    since_ns: int
    causes: Sequence[Cause] = ()


@dataclass(slots=True)
class _CauseTrack:
    """The state of a cause that holds or held recently."""

    cause: Cause
    """The cause: for a shortage with current figures, otherwise as last seen."""
    pending_ns: int
    named: bool = False
    clear_ns: int = 0
    """The time since which the cause has been gone; 0 while it holds."""
    held_ns: int = 0
    """The last time at which the cause was not clear of its threshold."""
    action: Action | None = None
    """The last advised action, which may no longer be in force."""


class VerdictWatch:
    """The causes of all models over time; calls must come in order of time."""

    def __init__(self, limits: VerdictLimits) -> None:
        self.limits = limits
        self._tracks: dict[tuple[str, str], _CauseTrack] = {}
        self._code: CauseCode | None = None
        self._since_ns = 0
        self.promises = PromiseLog()
        self._actions = 0
        """The number of actions advised so far, used for their ids."""

    def look(
        self,
        models: Iterable[ModelState | UnknownState],
        now_ns: int,
        others: Iterable[Cause] = (),
        *,
        acts: bool = False,
    ) -> Verdict:
        """Return the verdict of now.

        `others` are causes found elsewhere, which must also last before they are named. `acts` means that a planner
        moves workers by itself.
        """
        margins = self.promises.margins
        models = [
            replace(each, margins=margins, acts=acts) if isinstance(each, ModelState) else each for each in models
        ]
        known = [each for each in models if isinstance(each, ModelState)]
        found = {_key(cause): cause for state in models for cause in silences(state)}
        for state in known:
            for cause in causes(state, self.limits, now_ns, self._named(state.model)):
                found[_key(cause)] = cause
        explained = {each.model for each in found.values()}
        found |= {_key(each): each for each in others if each.code is not CauseCode.LATE or each.model not in explained}
        for key in [key for key in self._tracks if key not in found]:
            self._clear(key, now_ns)
        for key, cause in found.items():
            self._hold(key, cause, now_ns)
        for state in known:
            self._restate(state, found.get((state.model, _SHORTAGE)), now_ns)
        named = [track for track in self._tracks.values() if track.named]
        named.sort(key=lambda each: (each.cause.rank, each.pending_ns))
        standing = [track.cause.seen(track.pending_ns) for track in named]
        if acts:
            self.promises.forget()
        else:
            self.promises.look(known, standing, now_ns)
        return self._verdict(models, standing, now_ns)

    def _named(self, model: str) -> Cause | None:
        """Return the model's currently named shortage."""
        track = self._tracks.get((model, _SHORTAGE))
        return track.cause.seen(track.pending_ns) if track is not None and track.named else None

    def _restate(self, state: ModelState, found: Cause | None, now_ns: int) -> None:
        """Update the sentence, the figures and the action of a model's shortage to one instant."""
        track = self._tracks.get((state.model, _SHORTAGE))
        if track is None or not track.named:
            return
        before, cause = track.action, track.cause
        if found is None or found.code is not cause.code:
            cause = restated(cause, state, self.limits, advised=now_ns - track.held_ns < ADVISED_NS)
        if cause.action is not None and not cause.action.id:
            self._actions += 1
            replaces = "" if before is None else before.command
            action = replace(cause.action, id=f"{state.model}/{self._actions}", since_ns=now_ns, replaces=replaces)
            cause = replace(cause, action=action)
        track.cause, track.action = cause, cause.action or before

    def _verdict(self, models: Sequence[ModelState | UnknownState], standing: Sequence[Cause], now_ns: int) -> Verdict:
        if standing:
            first = standing[0]
            self._code, self._since_ns = first.code, first.since_ns
            return Verdict(first.code, first.model, first.sentence, first.since_ns, standing)
        code, model, sentence = _calm(models)
        if code is not self._code:
            self._code, self._since_ns = code, now_ns
        return Verdict(code, model, sentence, self._since_ns)

    def _hold(self, key: tuple[str, str], cause: Cause, now_ns: int) -> None:
        track = self._tracks.get(key)
        if track is None:
            if cause.grade is Grade.FIRE and len(self._tracks) < MAX_FOLLOWED:
                self._tracks[key] = _CauseTrack(cause, now_ns, held_ns=now_ns)
                track = self._tracks[key]
            else:
                return
        if cause.grade is not Grade.FIRE:
            if not track.named:
                del self._tracks[key]
            elif cause.code is track.cause.code:
                track.cause, track.clear_ns, track.held_ns = cause, 0, now_ns
            else:
                track.clear_ns = 0
            return
        if track.named and cause.code is not track.cause.code:  # another shortage of the model
            self._switch(track, cause, now_ns)
            return
        track.cause, track.clear_ns, track.held_ns = cause, 0, now_ns
        track.named = track.named or now_ns - track.pending_ns >= self._lasting_ns(cause)

    def _lasting_ns(self, cause: Cause) -> int:
        """Return the time for which a cause must have lasted before it is named."""
        if cause.is_slight:
            return self.limits.slight_for_ns
        return self.limits.slow_for_ns if cause.code in _SEEN_TO_LAST else self.limits.for_ns

    def _switch(self, track: _CauseTrack, cause: Cause, now_ns: int) -> None:
        """Switch to another code once that code has held as long as a new cause must."""
        track.clear_ns = track.clear_ns or now_ns
        if now_ns - track.clear_ns >= self._lasting_ns(cause):
            track.cause, track.pending_ns, track.clear_ns, track.held_ns = cause, track.clear_ns, 0, now_ns

    def _clear(self, key: tuple[str, str], now_ns: int) -> None:
        track = self._tracks[key]
        track.clear_ns = track.clear_ns or now_ns
        # A worker that reports again is no longer silent.
        ends = not track.named or track.cause.code is CauseCode.SILENT_WORKER
        clear_ns = self.limits.clear_ns if track.cause.code is not CauseCode.LATE else LATE_CLEAR_NS
        if ends or now_ns - track.clear_ns >= clear_ns:
            del self._tracks[key]


def _key(cause: Cause) -> tuple[str, str]:
    # A model has one shortage at a time.
    return cause.model, _SHORTAGE if cause.code in SHORTAGES else cause.code


def _calm(models: Sequence[ModelState | UnknownState]) -> tuple[CauseCode, str, str]:
    only = models[0].model if len(models) == 1 else ""
    if all(each.at_rest for each in models):
        return CauseCode.IDLE, only, "Idle: nothing runs or waits." if models else "Idle: there are no workers."
    known = [each for each in models if isinstance(each, ModelState) and not each.at_rest]
    if not known:
        why = next(each.why for each in models if isinstance(each, UnknownState) and not each.at_rest)
        return CauseCode.UNKNOWN, only, f"Not known: {why}."
    prefill = max(each.pressures.prefill for each in known)
    decode = max(each.pressures.decode for each in known)
    targets = {(each.ttft_ns, each.work.tpot_ns) for each in known}
    ttft_ns, tpot_ns = min(targets)
    met = f": TTFT {ttft_ns / 1e9:g} s, TPOT {tpot_ns / 1e6:g} ms" if len(targets) == 1 else " of every model"
    figures = f"prefill pressure {prefill:.1f}, decode pressure {decode:.1f}"
    settled = "Balanced" if max(prefill, decode) <= 1 else "Balanced until a moment ago"
    return CauseCode.BALANCED, only, f"{settled}: {figures}. A pressure of 1 would just meet the targets{met}."
