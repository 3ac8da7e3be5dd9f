"""Readings of every voice of a suite, and whether the voices agree with each other and with clients.

The voices are `/v1/status`, which the page draws; the texts of `fulcrum status` and `fulcrum top`; the planner's
figures, workers and recommendation; and the firing alerts.
"""

import math
from collections import deque
from collections.abc import Reversible, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from libs.cli.status.answer import parse_status
from libs.cli.status.show import lines
from libs.cli.top.head import verdict as top_verdict
from libs.cli.top.model import TopModel
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, ACTION_RECOMMEND, Decision
from libs.policy.verdict.causes import CauseCode
from load.chaos.invariants import METRICS, PLANNER
from load.chaos.suite import ClientRequest, VirtualSuite
from load.verdict.scenes import CALM
from services.planner.http.answers import planner_answer

LAG_S: Final = 1.0
"""Time for which voices may differ: planners repeat a recommendation once a second."""
WIDE: Final = 120
ROLES: Final = "fulcrum role "
"""The start of commands that the verdict advises; an alert may name others of its own, such as `fulcrum doctor`."""
SHOWN: Final = 0.05
"""Difference of two pressures from which people see two figures."""


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of all voices."""

    at_s: float
    code: str
    sentence: str
    command: str
    pressures: tuple[float, float] | None
    """Of prompts and of decodes, by the status."""
    planned: tuple[float, float] | None
    """The same by the planner."""
    recommended: frozenset[str]
    """Workers that the planner would have moved by an order of its own; empty for none."""
    advised: frozenset[str]
    lives: tuple[tuple[str, str], ...]
    planner_lives: tuple[tuple[str, str], ...]
    alerts: tuple[tuple[str, str], ...]
    """Name and command of each alert that fires."""
    roles: tuple[tuple[str, str], ...]
    unsaid: str
    """A sentence or command that a text leaves out; empty if none does."""


def look(suite: VirtualSuite) -> Look:
    """Read all voices at this moment."""
    now_ns = suite.cluster.clock.now_ns()
    answer = suite.status()
    verdict, models = answer["verdict"], [each for each in answer["models"] if each["known"]]
    action = verdict["action"] or {}
    planner = suite.cluster.processes[PLANNER].planner
    metrics = suite.cluster.processes[METRICS].metrics
    assert planner is not None and metrics is not None
    plans = [each.now for each in planner_answer(planner.state, now_ns).models if each.now]
    return Look(
        at_s=suite.now_s,
        code=str(verdict["code"]),
        sentence=verdict["sentence"],
        command=action.get("command", ""),
        pressures=(models[0]["prefill"]["pressure"], models[0]["decode"]["pressure"]) if models else None,
        planned=(plans[0].prompt_pressure, plans[0].decode_pressure) if plans else None,
        recommended=_recommended(planner.state.decisions),
        advised=frozenset(action.get("workers", ())),
        lives=tuple(sorted((each["id"], each["life"]) for each in answer["workers"])),
        planner_lives=tuple(sorted((name, life.state) for name, life in planner.state.lives(now_ns).items())),
        alerts=tuple(sorted((each.name, each.command) for each in metrics.desk.book.firing())),
        roles=tuple(sorted((each["id"], each["role"]) for each in answer["workers"])),
        unsaid=_unsaid(answer),
    )


def _recommended(decisions: Reversible[Decision]) -> frozenset[str]:
    """Return the workers of the planner's newest recommendation of roles that no later decision has taken back."""
    for each in reversed(decisions):
        if each.action == ACTION_KEEP:
            break
        if each.action == ACTION_RECOMMEND and each.changes:  # others are advice on settings
            return frozenset(change.worker_id for change in each.changes)
    return frozenset()


def _unsaid(answer: dict[str, Any]) -> str:
    """Return what the terminal's texts leave out of the verdict."""
    status, top = parse_status(answer), TopModel()
    top.status = status
    texts = ("\n".join(line.plain for line in lines(status)), top_verdict(top, WIDE).plain)
    wanted = [status.verdict.sentence, *([status.verdict.action.command] if status.verdict.action else [])]
    return next((each for text in texts for each in wanted if each not in text), "")


@dataclass(slots=True)
class Judge:
    """Counts, look by look, where voices differ and where green is not true."""

    ttft_s: float
    differences: list[str] = field(default_factory=list)
    """Each with its time, once for as long as it lasts."""
    late_s: float = 0.0
    """Seconds for which clients were late."""
    green_s: float = 0.0
    """Seconds for which the verdict was calm although clients were late for longer than `LATE_S`."""
    green: str = ""
    """The first such moment."""
    _recent: deque[Look] = field(default_factory=deque)
    _differing: dict[str, float] = field(default_factory=dict)
    """By what differs, since when; infinite once it was counted."""
    unfounded: str = ""
    """The first sentence that calls requests late more than `LATE_S` after the last moment at which they were."""
    _late_since_s: float | None = None
    _last_late_s: float = -math.inf

    LATE_S = 3.0

    def take(self, seen: Look, requests: Sequence[ClientRequest], period_s: float) -> None:
        self._recent.append(seen)
        while self._recent[0].at_s < seen.at_s - LAG_S:
            self._recent.popleft()
        self._compare(seen)
        late = late_share(requests, seen.at_s, self.ttft_s) > LATE_SHARE
        self.late_s += period_s * late
        self._last_late_s = seen.at_s if late else self._last_late_s
        if seen.code == CauseCode.LATE and seen.at_s - self._last_late_s > self.LATE_S:
            self.unfounded = self.unfounded or seen.sentence
        self._late_since_s = (self._late_since_s or seen.at_s) if late else None
        if self._late_since_s is not None and seen.at_s - self._late_since_s > self.LATE_S and seen.code in CALM:
            self.green_s += period_s
            self.green = self.green or f"{seen.at_s:.1f} s: {seen.sentence}"

    def _compare(self, seen: Look) -> None:
        figures = [each.pressures for each in self._recent if each.pressures is not None]
        differing = {
            "figures": seen.planned is not None and bool(figures) and not _between(seen.planned, figures),
            "workers to move": seen.recommended != seen.advised,
            "states of workers": seen.planner_lives != seen.lives,
            "an alert's command": any(
                command.startswith(ROLES) and command != seen.command for _, command in seen.alerts
            ),
            "a text": bool(seen.unsaid),
        }
        for what, differs in differing.items():
            if not differs:
                self._differing.pop(what, None)
            elif seen.at_s - self._differing.setdefault(what, seen.at_s) > LAG_S:
                self._differing[what] = math.inf
                self.differences.append(f"{seen.at_s:.1f} s: {what}: {_shown(what, seen)}")


LATE_SHARE: Final = 0.05


def late_share(requests: Sequence[ClientRequest], now_s: float, ttft_s: float) -> float:
    """Return the share of requests over their TTFT, of those that wait and those answered in the last two seconds."""
    ages = [now_s - each.sent_s for each in requests if not each.first_s and not each.done]
    ages += [each.first_s - each.sent_s for each in requests if each.first_s > now_s - 2.0]
    return sum(age > ttft_s for age in ages) / len(ages) if ages else 0.0


def _between(planned: tuple[float, float], figures: Sequence[tuple[float, float]]) -> bool:
    """Return whether the planner's figures lie among the status's of the last second, of which a reader sees some."""
    prompts, decodes = zip(*figures, strict=True)
    return all(
        min(seen) - SHOWN <= own <= max(seen) + SHOWN for own, seen in zip(planned, (prompts, decodes), strict=True)
    )


def _shown(what: str, seen: Look) -> str:
    match what:
        case "figures":
            return f"planner {seen.planned}, status {seen.pressures}"
        case "workers to move":
            return f"planner {sorted(seen.recommended)}, status {sorted(seen.advised)} ({seen.code})"
        case "states of workers":
            planner, status = set(seen.planner_lives), set(seen.lives)
            return f"planner only {planner - status}, status only {status - planner}"
        case "an alert's command":
            return f"{seen.alerts}, status {seen.command!r}"
        case _:
            return seen.unsaid
