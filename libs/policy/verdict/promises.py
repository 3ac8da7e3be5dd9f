"""Scores of followed advice by the pressure that came, and the margins of later promises. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Final

from libs.policy.roles import Role
from libs.policy.verdict.advice import Action
from libs.policy.verdict.causes import SHORTAGES, Cause
from libs.policy.verdict.state import NO_MARGIN, ModelState, PromiseMargin

# Sequences and KV move first, and the shares of time behind a pressure are of two seconds.
SEEN_FROM_NS: Final = 1_000_000_000
SEEN_TO_NS: Final = 2_500_000_000
"""Between these ages of a followed command its model's pressure is what came of it, as the median."""
FOLLOWED_NS: Final = 10_000_000_000
"""The time after which a command that ended is not followed any more when its workers change roles."""
MAX_OUTCOMES: Final = 200
MAX_MODELS: Final = 64
"""The most models with a command or a promise that is still to be seen."""
LEAST_OUTCOMES: Final = 5
"""The fewest outcomes from which ranges widen and the share of kept promises is said."""
RECENT: Final = 20
"""The most outcomes of a kind that widen its ranges."""
KEPT_SHARE: Final = 0.9
"""The share of recent outcomes that lie on the right side of each end of a widened range."""
MOST_WIDENED: Final = 4.0
"""Bound on either factor, so that one outcome near 0 does not make a promise of anything."""


@dataclass(frozen=True, slots=True)
class PromiseOutcome:
    """A command that was followed, with the pressure that it promised and the one that came."""

    id: str
    model: str
    code: str
    command: str
    role: str
    followed_ns: int
    then: float
    """The predicted pressure of the worse phase, promised to lie between `least` and `most`."""
    least: float
    most: float
    came: float
    """The median pressure from 1 to 2.5 s after the workers had their roles."""

    @property
    def kept(self) -> bool:
        return self.least <= self.came <= self.most


@dataclass(slots=True)
class _Advised:
    code: str
    action: Action
    stood_ns: int
    """The last time at which it was advised."""


@dataclass(slots=True)
class _Followed:
    code: str
    action: Action
    at_ns: int
    came: list[float] = field(default_factory=list)


class PromiseLog:
    """The promises of all models; calls must come in order of time."""

    def __init__(self) -> None:
        self._advised: dict[str, _Advised] = {}
        self._followed: dict[str, _Followed] = {}
        self._outcomes: deque[PromiseOutcome] = deque(maxlen=MAX_OUTCOMES)
        self.margins: Mapping[str, PromiseMargin] = {}
        """By role of the moved workers, how far ranges widen and how many promises were kept."""

    @property
    def outcomes(self) -> Sequence[PromiseOutcome]:
        """The last outcomes, oldest first. They are not kept over a restart."""
        return tuple(self._outcomes)

    def look(self, models: Iterable[ModelState], causes: Sequence[Cause], now_ns: int) -> None:
        """Record what is advised now, which commands have been followed, and what came of earlier ones."""
        for state in models:
            self._see(state, now_ns)
        for cause in causes:
            if cause.action is not None and cause.code in SHORTAGES and self._has_room(cause.model):
                self._advised[cause.model] = _Advised(str(cause.code), cause.action, now_ns)

    def forget(self) -> None:
        """Drop what is advised and followed, because a planner moves workers by itself."""
        self._advised.clear()
        self._followed.clear()

    def _has_room(self, model: str) -> bool:
        return model in self._advised or len(self._advised) < MAX_MODELS

    def _see(self, state: ModelState, now_ns: int) -> None:
        followed = self._followed.get(state.model)
        if followed is not None:
            age_ns = now_ns - followed.at_ns
            if age_ns <= SEEN_TO_NS:
                if age_ns >= SEEN_FROM_NS:
                    followed.came.append(max(state.pressures.prefill, state.pressures.decode))
                return
            self._end(state.model, self._followed.pop(state.model))
        advised = self._advised.get(state.model)
        if advised is None:
            return
        if now_ns - advised.stood_ns > FOLLOWED_NS:
            del self._advised[state.model]
        elif _is_followed(state, advised.action):
            del self._advised[state.model]
            if len(self._followed) < MAX_MODELS:
                self._followed[state.model] = _Followed(advised.code, advised.action, now_ns)

    def _end(self, model: str, followed: _Followed) -> None:
        if not followed.came:
            return
        action, came = followed.action, median(followed.came)
        about = action.id, model, followed.code, action.command, action.role, followed.at_ns
        self._outcomes.append(PromiseOutcome(*about, action.pressure_then, *action.pressure_range, came))
        self.margins = {role: self._margin(role) for role in {each.role for each in self._outcomes}}

    def _margin(self, role: str) -> PromiseMargin:
        own = [each for each in self._outcomes if each.role == role][-RECENT:]
        if len(own) < LEAST_OUTCOMES:
            return NO_MARGIN
        # Finite-sample quantiles of the ratios, as in split conformal prediction.
        over = _quantile([each.came / max(each.then, 1e-9) for each in own])
        under = _quantile([each.then / max(each.came, 1e-9) for each in own])
        return PromiseMargin(over, under, sum(each.kept for each in own), len(own))


def _quantile(ratios: list[float]) -> float:
    rank = min(ceil((len(ratios) + 1) * KEPT_SHARE), len(ratios))
    return min(max(sorted(ratios)[rank - 1], 1.0), MOST_WIDENED)


def _is_followed(state: ModelState, action: Action) -> bool:
    names = frozenset(action.workers)
    own = [each for each in state.workers if each.id in names]
    wanted = Role.PREFILL if action.role == "prefill" else Role.MIXED
    if len(own) < len(names) or any(each.role is not wanted for each in own):
        return False
    return action.role != "mixed" or all(each.budget_tokens for each in own)
