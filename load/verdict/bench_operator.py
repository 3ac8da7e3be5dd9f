"""Play floods, faults and quiet hours in virtual time, and check what an operator is told (`make bench-operator`).

Four times a second the bench reads `/v1/status`, which the page draws, the texts of `fulcrum status` and `fulcrum top`,
the planner's figures, workers and recommendation, and the firing alerts. A scene is right if an expected verdict comes
within three seconds of its cause, and if all these sources agree. No verdict may be calm while clients are late. A
command may change at most once in ten seconds, unless its cause did, and only the scene's alerts may fire.
"""

import argparse
import asyncio
import json
import math
import os
import time
from collections import deque
from collections.abc import Reversible, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final

from libs.cli.status.answer import parse_status
from libs.cli.status.show import lines
from libs.cli.top.head import verdict as top_verdict
from libs.cli.top.model import TopModel
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_KEEP, ACTION_RECOMMEND, Decision
from libs.policy.alerts.rules import Name, make_rules
from libs.policy.verdict.causes import CauseCode
from libs.telemetry.lives import SERVING
from load.chaos.invariants import METRICS, PLANNER
from load.chaos.suite import ClientRequest, VirtualSuite, run_virtual
from load.verdict.scenes import CALM, SCENES, Scene, Stage
from load.verdict.situations import DrawnSuite, Situations, draw_suite
from load.verdict.virtual import LINE, WaitingJob, is_there, suite_of, warm
from services.metrics.settings import MetricsSettings
from services.metrics.status.score import promise_score
from services.planner.http.answers import planner_answer

LAG_S: Final = 1.0
"""The time for which sources may differ, since planners repeat a recommendation once a second."""
WIDE: Final = 120
ROLES: Final = "fulcrum role "
"""The prefix of commands that the verdict advises. An alert may name a command of its own, such as `fulcrum doctor`."""
SHOWN: Final = 0.05
"""The smallest difference between two pressures that are displayed as different figures."""


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of all sources."""

    at_s: float
    code: str
    sentence: str
    command: str
    pressures: tuple[float, float] | None
    """The pressures of prompts and of decodes in the status; None if unknown."""
    planned: tuple[float, float] | None
    """The planner's pressures of prompts and of decodes; None without a plan."""
    recommended: frozenset[str]
    """The workers that the planner recommends to move; empty for none."""
    advised: frozenset[str]
    lives: tuple[tuple[str, str], ...]
    planner_lives: tuple[tuple[str, str], ...]
    alerts: tuple[tuple[str, str], ...]
    """The name and command of each firing alert."""
    roles: tuple[tuple[str, str], ...]
    unsaid: str
    """A required sentence or command that a text lacks; empty if none is missing."""


def look(suite: VirtualSuite) -> Look:
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
    """Return the workers in the newest recommendation of roles; empty if a later decision keeps roles."""
    for each in reversed(decisions):
        if each.action == ACTION_KEEP:
            break
        if each.action == ACTION_RECOMMEND and each.changes:  # others are advice on settings
            return frozenset(change.worker_id for change in each.changes)
    return frozenset()


def _unsaid(answer: dict[str, Any]) -> str:
    """Return the first part of the verdict that a text of the terminal lacks; empty if none is missing."""
    status, top = parse_status(answer), TopModel()
    top.status = status
    texts = ("\n".join(line.plain for line in lines(status)), top_verdict(top, WIDE).plain)
    wanted = [status.verdict.sentence, *([status.verdict.action.command] if status.verdict.action else [])]
    return next((each for text in texts for each in wanted if each not in text), "")


@dataclass(slots=True)
class Judge:
    """A judge of readings, who finds sources that differ and verdicts that are falsely calm."""

    ttft_s: float
    differences: list[str] = field(default_factory=list)
    """The differences with their times, each once for as long as it lasts."""
    late_s: float = 0.0
    green_s: float = 0.0
    """The seconds for which the verdict was calm although clients had been late for longer than `LATE_S`."""
    green: str = ""
    """The first reading that counts in `green_s`, with its sentence."""
    _recent: deque[Look] = field(default_factory=deque)
    _differing: dict[str, float] = field(default_factory=dict)
    """The time since which a source differs, by its name; infinite once it was reported."""
    unfounded: str = ""
    """The first sentence that calls requests late more than `LATE_S` after the last time at which they were."""
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
    """Return the share of late requests, among those that wait or got a first token in the last two seconds.

    A request is late if it is over its TTFT target.
    """
    ages = [now_s - each.sent_s for each in requests if not each.first_s and not each.done]
    ages += [each.first_s - each.sent_s for each in requests if each.first_s > now_s - 2.0]
    return sum(age > ttft_s for age in ages) / len(ages) if ages else 0.0


def _between(planned: tuple[float, float], figures: Sequence[tuple[float, float]]) -> bool:
    """Return whether the planner's figures lie within the range of the status's figures in the last second."""
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


PERIOD_S: Final = 0.25
WITHIN_S: Final = 3.0
STANDS_S: Final = 2.0
"""The time for which a command must have been offered before it is run."""
CHANGE_S: Final = 10.0
ALERT_BEYOND_S: Final = 5.0
TOWARDS_PROMPTS: Final = ("decode", "mixed", "prefill")
MODES: Final = ("followed", "ignored", "auto")
"""The modes: the operator runs the first command, the operator does nothing, or the planner acts by itself."""


@dataclass(slots=True)
class SceneResult:
    """The outcome of one scene in one mode. Times are in seconds."""

    name: str
    mode: str
    seed: int
    named_s: float | None = None
    """The time from the cause to an expected verdict; None if none came."""
    wrong: str = ""
    """The first verdict that neither the cause nor calm explains."""
    differences: list[str] = field(default_factory=list)
    late_s: float = 0.0
    """The time for which more than one client in twenty was late, whatever the verdict."""
    green_s: float = 0.0
    green: str = ""
    command_changes: int = 0
    """The number of commands that changed within ten seconds of the last change although the cause remained."""
    role_changes: int = 0
    """The number of role changes. Lending a decode worker to prompts is one."""
    back_and_forth: int = 0
    """The number of role changes that revert a change of the same worker within ten seconds."""
    alerts: dict[str, float] = field(default_factory=dict)
    """The time from the cause until each alert fired, by name."""
    false_alerts: list[str] = field(default_factory=list)
    late_alerts: list[str] = field(default_factory=list)
    mended: bool = False
    """True if the planner acts and no verdict was calm while clients were late. A verdict is then not required."""
    promises: list[dict[str, Any]] = field(default_factory=list)
    looks: int = 0
    lasted_s: float = 0.0
    failed: int = 0
    """The number of requests that failed, which in the scene "refused" are all."""

    @property
    def faults(self) -> list[str]:
        found = []
        if not self.mended and (self.named_s is None or self.named_s > WITHIN_S):
            found.append("not named" if self.named_s is None else f"named after {self.named_s:.1f} s")
        found += [f"said {self.wrong}"] if self.wrong else []
        found += [f"voices differ {len(self.differences)} times"] if self.differences else []
        found += [f"green for {self.green_s:.1f} s"] if self.green_s else []
        found += [f"{self.command_changes} changes of command"] if self.command_changes else []
        found += [f"{self.back_and_forth} roles back and forth"] if self.back_and_forth else []
        found += [f"false {', '.join(self.false_alerts)}"] if self.false_alerts else []
        found += [f"late {', '.join(self.late_alerts)}"] if self.late_alerts else []
        found += [f"{self.missed} promises missed"] if self.missed else []
        return found

    @property
    def missed(self) -> int:
        return sum(not each["kept"] for each in self.promises)


def run_scene(name: str, mode: str, seed: int) -> SceneResult:
    """Play a scene on its own suite. The seed draws the suite's device, roles and load."""
    scene = next(each for each in SCENES if each.name == name)
    drawn = draw_suite(seed, little_kv=False)
    planted = Situations(drawn.device, seed * 1_000 + SCENES.index(scene)).of(scene.load)
    job = WaitingJob(*LINE)
    waiting = job if scene.name.startswith("batch") else None
    spec = suite_of(drawn, planted, mode="auto" if mode == "auto" else "advisory", job=waiting)

    async def play(suite: VirtualSuite) -> SceneResult:
        await warm(suite, drawn.device, planted.load.isl)
        stage = Stage(suite, drawn.device, planted, seed)
        job.begin.set()
        return await _Reader(scene, mode, stage, drawn).run()

    return run_virtual(spec, seed, play)


class _Reader:
    def __init__(self, scene: Scene, mode: str, stage: Stage, drawn: DrawnSuite) -> None:
        self._scene, self._mode, self._stage = scene, mode, stage
        self._suite = stage.suite
        self._judge = Judge(drawn.device.ttft_s)
        self._looks: list[Look] = []
        self._first = len(stage.suite.requests)
        self._applied = mode != "followed"
        self._offered_s: float | None = None

    async def run(self) -> SceneResult:
        suite, began_s = self._suite, self._suite.now_s
        playing = suite.cluster.loop.spawn(suite.client, self._scene.play(self._stage))
        fired = {name for name, _ in look(suite).alerts}
        while not playing.done():
            self._read()
            await asyncio.sleep(PERIOD_S)
        playing.result()
        requests = suite.requests[self._first :]
        self._stage.end()
        return self._result(began_s, fired, sum(bool(each.failed) for each in requests))

    def _read(self) -> None:
        seen = look(self._suite)
        self._looks.append(seen)
        requests = self._suite.requests[self._first :]
        self._judge.take(seen, requests, PERIOD_S)
        if self._stage.cause_s is None and is_there(self._stage.device, self._stage.planted, requests):
            self._stage.caused()
        self._follow(seen)

    def _follow(self, seen: Look) -> None:
        """Run the first command that was offered for `STANDS_S`, as an operator would."""
        if self._applied or not seen.command:
            self._offered_s = None
            return
        self._offered_s = seen.at_s if self._offered_s is None else self._offered_s
        if seen.at_s - self._offered_s >= STANDS_S:
            self._applied = True
            *_, role = seen.command.split()
            changing = self._suite.set_roles(sorted(seen.advised), role)
            self._suite.cluster.loop.spawn(self._suite.client, changing)

    def _result(self, began_s: float, fired: set[str], failed: int) -> SceneResult:
        scene, stage, judge = self._scene, self._stage, self._judge
        result = SceneResult(scene.name, self._mode, stage.seed, looks=len(self._looks), failed=failed)
        result.lasted_s = self._suite.now_s - began_s
        result.differences, result.green_s, result.green = judge.differences, judge.green_s, judge.green
        result.late_s = judge.late_s
        cause_s = began_s if stage.cause_s is None else stage.cause_s
        named = [each.at_s for each in self._looks if each.code in scene.wanted and each.at_s >= cause_s]
        result.named_s = max(named[0] - cause_s, 0.0) if named else None
        may = scene.wanted | scene.allowed | CALM | {CauseCode.LATE}  # the clients' own times confirm LATE
        wrong = (f"{each.code}: {each.sentence}" for each in self._looks if each.code not in may)
        result.wrong = next(wrong, judge.unfounded)
        result.command_changes = _command_changes(self._looks)
        result.role_changes, result.back_and_forth = _role_changes(self._looks)
        for each in self._looks:
            for name, _ in each.alerts:
                if name not in fired:
                    result.alerts.setdefault(name, round(each.at_s - cause_s, 2))
        if scene.is_calm:
            result.false_alerts = sorted(result.alerts)
        if self._mode == "ignored":  # no alert is required if someone acts
            result.late_alerts = self._late_alerts(result)
        result.mended = self._mode == "auto" and not judge.green_s
        metrics = self._suite.cluster.processes[METRICS].metrics
        assert metrics is not None
        result.promises = [asdict(each) for each in promise_score(metrics.verdicts.promises).outcomes]
        return result

    def _late_alerts(self, result: SceneResult) -> list[str]:
        late, rules = [], make_rules(MetricsSettings().alert_limits())
        for name in sorted(self._scene.alerts):
            for_s = rules[Name(name)].for_ns / 1e9
            came_s = result.alerts.get(name)
            if came_s is None:
                late.append(f"{name} (never)")
            elif came_s > for_s + ALERT_BEYOND_S:
                late.append(f"{name} ({came_s - for_s:.1f} s beyond {for_s:.0f} s)")
        return late


def _command_changes(looks: Sequence[Look]) -> int:
    """Return the number of commands that replaced another within `CHANGE_S` without a change of verdict or roles."""
    changes, last_s = 0, None
    for before, after in pairwise([each for each in looks if each.command]):
        if before.command == after.command:
            continue
        if before.code == after.code and before.roles == after.roles:
            changes += last_s is not None and after.at_s - last_s < CHANGE_S
        last_s = after.at_s
    return changes


def _role_changes(looks: Sequence[Look]) -> tuple[int, int]:
    """Return the number of role changes, and of those that revert a change of the same worker within `CHANGE_S`.

    A decode worker that is lent to prompts and then becomes a prefill worker moves twice in the same direction. The
    role of a restarted worker is no change.
    """
    last: dict[str, tuple[float, bool]] = {}
    changes = count = 0
    for before, after in pairwise(looks):
        were, served = dict(before.roles), {name for name, life in before.lives if life in SERVING}
        for name, role in set(after.roles) - set(before.roles):
            if name in served and role in TOWARDS_PROMPTS and were.get(name) in TOWARDS_PROMPTS:
                changes += 1
                to_prompts = TOWARDS_PROMPTS.index(role) > TOWARDS_PROMPTS.index(were[name])
                at_s, way = last.get(name, (-CHANGE_S, to_prompts))
                count += way is not to_prompts and after.at_s - at_s < CHANGE_S
                last[name] = after.at_s, to_prompts
    return changes, count


def _line(result: SceneResult) -> str:
    named = "    –" if result.named_s is None else f"{result.named_s:>5.1f}"
    right = "right" if not result.faults else "WRONG"
    said = "; ".join(result.faults)
    kept = f"{len(result.promises) - result.missed}/{len(result.promises)}"
    head = f"{result.seed:>5} {result.name:<20} {result.mode:<9} {right} named {named} s late {result.late_s:>4.0f} s"
    return f"{head} promises {kept} {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="devices that are drawn; each scene is played on each")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--only", nargs="+", metavar="PART", help="scenes whose name has one of these parts")
    options = parser.parse_args()
    began_s, found = time.monotonic(), list[SceneResult]()
    names = [each.name for each in SCENES if not options.only or any(part in each.name for part in options.only)]
    seeds = range(options.seed, options.seed + options.seeds)
    plays = [(name, mode, seed) for seed in seeds for name in names for mode in MODES]
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        for result in processes.map(run_scene, *zip(*plays, strict=True)):
            found.append(result)
            print(_line(result), flush=True)
            for each in filter(None, (*result.differences, result.green)):
                print(f"      {each}")
    print(json.dumps(summary(found, time.monotonic() - began_s)))


def summary(found: Sequence[SceneResult], took_s: float) -> dict[str, Any]:
    calm_h = sum(each.lasted_s for each in found if each.name in {one.name for one in SCENES if one.is_calm}) / 3600
    named = sorted(each.named_s for each in found if each.named_s is not None)
    return {
        "scenes": len(found),
        "right": sum(not each.faults for each in found),
        "looks": sum(each.looks for each in found),
        "named_within_3_s": sum(each <= WITHIN_S for each in named),
        "differences": sum(len(each.differences) for each in found),
        "green_while_late_s": round(sum(each.green_s for each in found), 2),
        "command_changes": sum(each.command_changes for each in found),
        "role_changes": sum(each.role_changes for each in found),
        "roles_back_and_forth": sum(each.back_and_forth for each in found),
        "promises": sum(len(each.promises) for each in found),
        "promises_kept": sum(len(each.promises) - each.missed for each in found),
        "false_alerts_per_hour": round(sum(len(each.false_alerts) for each in found) / calm_h, 2) if calm_h else None,
        "late_alerts": sum(len(each.late_alerts) for each in found),
        "wrong": [
            f"{each.name}, {each.mode} (seed {each.seed}): {'; '.join(each.faults)}" for each in found if each.faults
        ],
        "took_s": round(took_s, 1),
    }


if __name__ == "__main__":
    main()
