"""Scores of followed advice by the outcome of its promises, and the margins of later promises. Pure."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Final

from libs.policy.roles import Role
from libs.policy.verdict.advice import Action
from libs.policy.verdict.causes import SHORTAGES, Cause
from libs.policy.verdict.state import NO_MARGIN, Margins, ModelState, PromisedFigure, PromiseMargin

# Sequences and KV move first. Pressures lag behind, because they are computed from shares of two seconds.
SEEN_FROM_NS: Final = 1_000_000_000
SEEN_TO_NS: Final = 2_500_000_000
"""The outcome of a followed command is its model's median pressure between these ages."""
FOLLOWED_NS: Final = 10_000_000_000
"""The time after which role changes no longer count as following a command that has ended."""
WATCHED_NS: Final = 120_000_000_000
"""The time after which a backlog that still exists counts as lasting that long."""
AFTER_NS: Final = 10_000_000_000
"""The time after the end of a backlog in which arriving requests count for the measured latency."""
ENDED_NS: Final = 30_000_000_000
"""The time after the end of a backlog by which such requests must have ended to count."""
LEAST_ANSWERS: Final = 8
"""The fewest requests for a p95."""
MAX_ANSWERS: Final = 2_000
"""The maximum number of requests of one followed command."""
MAX_OUTCOMES: Final = 200
"""The maximum number of outcomes kept of each figure."""
MAX_MODELS: Final = 64
"""The maximum number of models with a command or a pending promise."""
LEAST_OUTCOMES: Final = 5
"""The fewest outcomes from which ranges widen and the share of kept promises is shown."""
RECENT: Final = 20
"""The maximum number of outcomes of a kind that widen its ranges."""
KEPT_SHARE: Final = 0.9
"""The share of recent outcomes on the right side of each end of a widened range."""
MOST_WIDENED: Final = 4.0
"""The bound on either factor, so that one outcome near 0 does not make a promise meaningless."""


@dataclass(frozen=True, slots=True)
class PromiseOutcome:
    """One figure promised by a followed command, and its outcome."""

    figure: PromisedFigure
    id: str
    model: str
    code: str
    command: str
    role: str
    followed_ns: int
    then: float
    """The predicted figure, promised to lie between `least` and `most`."""
    least: float
    most: float
    came: float
    """The outcome: for pressure the median from 1 to 2.5 s after the workers had their roles, for latencies the p95."""

    @property
    def kept(self) -> bool:
        return self.least <= self.came <= self.most


@dataclass(slots=True)
class _Advised:
    code: str
    action: Action
    stood_ns: int
    """The last time at which the command was advised."""


@dataclass(slots=True)
class _Followed:
    code: str
    action: Action
    at_ns: int
    pressures: list[float] = field(default_factory=list)
    settled: bool = False
    """True if the time in which the pressure is measured has passed."""
    gone_ns: int = 0
    """The time at which the backlog was gone; 0 before."""
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))
    """Pairs of (TTFT, TPOT) in ms of requests that arrived soon after that; TPOT is 0 with a single token."""


class PromiseLog:
    """The promises of all models; calls must come in order of time."""

    def __init__(self) -> None:
        self._advised: dict[str, _Advised] = {}
        self._followed: dict[str, _Followed] = {}
        self._outcomes = {figure: deque[PromiseOutcome](maxlen=MAX_OUTCOMES) for figure in PromisedFigure}
        self.margins: Margins = {}
        """The factors by which ranges widen, with the number of kept promises."""

    @property
    def outcomes(self) -> Mapping[PromisedFigure, Sequence[PromiseOutcome]]:
        """The last outcomes of each figure, oldest first. They do not survive a restart."""
        return {figure: tuple(found) for figure, found in self._outcomes.items()}

    def look(self, models: Iterable[ModelState], causes: Sequence[Cause], now_ns: int) -> None:
        """Record current advice, commands that have been followed, and the outcomes of earlier ones."""
        for state in models:
            self._see(state, now_ns)
        for cause in causes:
            if cause.action is not None and cause.code in SHORTAGES and self._has_room(cause.model):
                self._advised[cause.model] = _Advised(str(cause.code), cause.action, now_ns)

    def answered(self, model: str, arrival_ns: int, ttft_ns: float, tpot_ns: float) -> None:
        """Record the latencies of an interactive request that has ended."""
        followed = self._followed.get(model)
        if followed is not None and followed.gone_ns and 0 <= arrival_ns - followed.gone_ns < AFTER_NS:
            followed.answers.append((ttft_ns / 1e6, tpot_ns / 1e6))

    def forget(self) -> None:
        """Drop current and followed advice, because a planner moves workers by itself."""
        self._advised.clear()
        self._followed.clear()

    def _has_room(self, model: str) -> bool:
        return model in self._advised or len(self._advised) < MAX_MODELS

    def _see(self, state: ModelState, now_ns: int) -> None:
        followed = self._followed.get(state.model)
        if followed is not None:
            if self._ends(followed, state, now_ns):
                del self._followed[state.model]
            if not followed.settled:
                return
        advised = self._advised.get(state.model)
        if advised is None:
            return
        if now_ns - advised.stood_ns > FOLLOWED_NS:
            del self._advised[state.model]
        elif _is_followed(state, advised.action):
            del self._advised[state.model]
            if state.model in self._followed or len(self._followed) < MAX_MODELS:
                self._followed[state.model] = _Followed(advised.code, advised.action, now_ns)

    def _ends(self, followed: _Followed, state: ModelState, now_ns: int) -> bool:
        """Record the outcomes so far of a followed command; return whether no more are expected."""
        age_ns = now_ns - followed.at_ns
        if not followed.settled:
            if age_ns > SEEN_TO_NS:
                followed.settled = True
                if followed.pressures:
                    self._record(followed, state.model, PromisedFigure.PRESSURE, median(followed.pressures))
            elif age_ns >= SEEN_FROM_NS:
                followed.pressures.append(max(state.pressures.prefill, state.pressures.decode))
        elif not _is_followed(state, followed.action):
            return True  # workers have moved again, so later figures do not belong to this command
        if not followed.gone_ns:
            if state.has_backlog and age_ns < WATCHED_NS:
                return False
            promise = followed.action.backlog_s
            # A promise that lasts longer than it is watched may still be kept.
            if promise is not None and not (state.has_backlog and promise.most > age_ns / 1e9):
                self._record(followed, state.model, PromisedFigure.BACKLOG, age_ns / 1e9)
            followed.gone_ns = now_ns
            return state.has_backlog
        if now_ns - followed.gone_ns < ENDED_NS:
            return False
        self._record_latencies(followed, state.model)
        return True

    def _record_latencies(self, followed: _Followed, model: str) -> None:
        for figure, index in ((PromisedFigure.TTFT, 0), (PromisedFigure.TPOT, 1)):
            values = [each[index] for each in followed.answers if each[index]]
            if len(values) >= LEAST_ANSWERS:
                self._record(followed, model, figure, p95(values))

    def _record(self, followed: _Followed, model: str, figure: PromisedFigure, came: float) -> None:
        action = followed.action
        promise = action.promises.get(figure)
        if promise is None:
            return
        about = action.id, model, followed.code, action.command, action.role, followed.at_ns
        found = self._outcomes[figure]
        found.append(PromiseOutcome(figure, *about, promise.then, promise.least, promise.most, came))
        roles = {each.role for each in found}
        self.margins = {**self.margins, **{(role, figure): _margin(found, role) for role in roles}}


def p95(values: Collection[float]) -> float:
    """Return the 95th percentile, which is one of the values; there must be at least one."""
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def _margin(outcomes: Iterable[PromiseOutcome], role: str) -> PromiseMargin:
    """Return the margin for moves to a role from the outcomes of one figure."""
    own = [each for each in outcomes if each.role == role][-RECENT:]
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
