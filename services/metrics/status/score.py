"""The answer of `/v1/advice`: promised and measured effects of followed commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.policy.verdict.assessment import bounded
from libs.policy.verdict.promises import PromiseOutcome
from libs.policy.verdict.state import PromisedFigure
from services.metrics.state import MS_NS

Outcomes = Mapping[PromisedFigure, Sequence[PromiseOutcome]]


@dataclass(frozen=True, slots=True)
class ReportedPromise:
    """A followed command, with the promised and the measured pressure of the worse phase."""

    id: str
    model: str
    code: str
    """The cause that the command addressed."""
    command: str
    followed_unix_ms: int
    pressure_least: float
    pressure_most: float
    came: float
    """The median from 1 to 2.5 s after the workers had their roles."""
    kept: bool


@dataclass(frozen=True, slots=True)
class PromiseCount:
    code: str
    kept: int
    of: int


@dataclass(frozen=True, slots=True)
class FigureScore:
    """The kept promises of one figure, by cause."""

    figure: str
    """One of pressure, backlog, ttft and tpot."""
    kept: int
    of: int
    by_cause: list[PromiseCount]


@dataclass(frozen=True, slots=True)
class ReportedOutcome:
    """One figure of a followed command, promised and measured: pressure, s of backlog, or p95 in ms."""

    figure: str
    id: str
    model: str
    code: str
    command: str
    followed_unix_ms: int
    least: float
    most: float
    came: float
    kept: bool


@dataclass(frozen=True, slots=True)
class PromiseScore:
    """The outcomes of the commands that were followed since the service started, up to 200 of them."""

    kept: int
    """This and the next three fields concern pressure only."""
    of: int
    by_cause: list[PromiseCount]
    promises: list[ReportedPromise]
    """The promises of recent advice, newest first."""
    by_figure: list[FigureScore]
    outcomes: list[ReportedOutcome]
    """The promises of all figures, up to 200 each, the newest command first."""


def figure_scores(outcomes: Outcomes) -> list[FigureScore]:
    """Count the kept promises of each figure that has any outcome."""
    return [
        FigureScore(figure, sum(each.kept for each in found), len(found), _by_cause(found))
        for figure, found in outcomes.items()
        if found
    ]


def _by_cause(outcomes: Sequence[PromiseOutcome]) -> list[PromiseCount]:
    own = {code: [each.kept for each in outcomes if each.code == code] for code in sorted({e.code for e in outcomes})}
    return [PromiseCount(code, sum(kept), len(kept)) for code, kept in own.items()]


def promise_score(outcomes: Outcomes) -> PromiseScore:
    pressures = outcomes.get(PromisedFigure.PRESSURE, ())
    everything = [each for found in outcomes.values() for each in found]
    return PromiseScore(
        kept=sum(each.kept for each in pressures),
        of=len(pressures),
        by_cause=_by_cause(pressures),
        promises=[
            ReportedPromise(
                id=each.id,
                model=each.model,
                code=each.code,
                command=each.command,
                followed_unix_ms=each.followed_ns // MS_NS,
                pressure_least=bounded(each.least),
                pressure_most=bounded(each.most),
                came=bounded(each.came),
                kept=each.kept,
            )
            for each in reversed(pressures)
        ],
        by_figure=figure_scores(outcomes),
        outcomes=[_outcome(each) for each in sorted(everything, key=lambda each: -each.followed_ns)],
    )


def _outcome(found: PromiseOutcome) -> ReportedOutcome:
    least, most, came = found.least, found.most, found.came
    if found.figure is PromisedFigure.PRESSURE:
        least, most, came = bounded(least), bounded(most), bounded(came)
    about = found.figure, found.id, found.model, found.code, found.command, found.followed_ns // MS_NS
    return ReportedOutcome(*about, least, most, came, found.kept)
