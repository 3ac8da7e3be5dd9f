"""Play floods, faults and quiet hours in virtual time, and check what an operator is told (`make bench-operator`).

Every voice is read four times a second. A scene is right when a verdict that it may have stands within three seconds
of its cause, the voices agree, nothing is called calm while clients are late, a command changes no more than once in
ten seconds unless its cause did, and only its alerts fire.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from libs.policy.alerts.rules import Name, make_rules
from libs.policy.verdict.causes import CauseCode
from load.chaos.invariants import METRICS
from load.chaos.suite import SuiteSpec, VirtualSuite, run_virtual
from load.verdict.scenes import CALM, SCENES, Scene, Stage
from load.verdict.situations import DrawnSuite, Situations, draw_suite
from load.verdict.virtual import LINE, WaitingJob, is_there, warm
from load.verdict.voices import Judge, Look, look
from services.gateway.batch.run import BatchPorts
from services.metrics.settings import MetricsSettings
from services.metrics.status.score import promise_score

PERIOD_S: Final = 0.25
WITHIN_S: Final = 3.0
STANDS_S: Final = 2.0
"""Time for which a command has been offered before it is run."""
CHANGE_S: Final = 10.0
ALERT_BEYOND_S: Final = 5.0
TOWARDS_PROMPTS: Final = ("decode", "mixed", "prefill")
MODES: Final = ("followed", "ignored", "auto")
"""Advisory and the first command is run, advisory and nobody does anything, or the planner acts."""


@dataclass(slots=True)
class SceneResult:
    """The outcome of one scene in one mode. Times are in seconds."""

    name: str
    mode: str
    seed: int
    named_s: float | None = None
    """Time from the cause until a wanted verdict; None if none came."""
    wrong: str = ""
    """The first verdict that neither the cause nor calm explains."""
    differences: list[str] = field(default_factory=list)
    late_s: float = 0.0
    """Time for which more than one client in twenty was late, whatever the verdict."""
    green_s: float = 0.0
    green: str = ""
    command_changes: int = 0
    """Changes of the command within ten seconds of the last although the cause stayed."""
    role_changes: int = 0
    """Changes of a worker's role; lending a decode worker to prompts is one."""
    back_and_forth: int = 0
    """Role changes within ten seconds of a change of the same worker the other way."""
    alerts: dict[str, float] = field(default_factory=dict)
    """Time from the cause until each alert fired, by name."""
    false_alerts: list[str] = field(default_factory=list)
    late_alerts: list[str] = field(default_factory=list)
    mended: bool = False
    """Whether the planner acts and nothing was called calm while clients were late, so that no verdict is missing."""
    promises: list[dict[str, Any]] = field(default_factory=list)
    looks: int = 0
    lasted_s: float = 0.0
    failed: int = 0
    """Number of requests that failed; those of the scene "refused" all do."""

    @property
    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
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
    """Play a scene on a suite of its own, whose device, roles and load the seed draws."""
    scene = next(each for each in SCENES if each.name == name)
    drawn = draw_suite(seed, little_kv=False)
    planted = Situations(drawn.device, seed * 1_000 + SCENES.index(scene)).of(scene.load)
    job: Any = WaitingJob(*LINE)
    spec = SuiteSpec(
        roles=["prefill"] * planted.prefill + ["decode"] * planted.decode,
        worker=drawn.worker(),
        gateway=drawn.targets(),
        planner=drawn.planner() | {"mode": "auto" if mode == "auto" else "advisory"},
        metrics=drawn.targets(),
        batch=BatchPorts(job, job) if scene.name.startswith("batch") else None,
    )

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
        self._first = len(stage.suite.asked)
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
        asked = suite.asked[self._first :]
        self._stage.end()
        return self._result(began_s, fired, sum(bool(each.failed) for each in asked))

    def _read(self) -> None:
        seen = look(self._suite)
        self._looks.append(seen)
        asked = self._suite.asked[self._first :]
        self._judge.take(seen, asked, PERIOD_S)
        if self._stage.cause_s is None and is_there(self._stage.device, self._stage.planted, asked):
            self._stage.caused()
        self._follow(seen)

    def _follow(self, seen: Look) -> None:
        """Run the first command that has been offered for a while, as an operator would."""
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
        may = scene.wanted | scene.allowed | CALM | {CauseCode.LATE}  # which clients' own times bear out
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
        if self._mode == "ignored":  # what is acted on needs no alert
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
    """Return how often a command replaced another within `CHANGE_S` although the verdict's code was the same."""
    changes, last_s = 0, None
    for before, after in pairwise([each for each in looks if each.command]):
        if before.command == after.command:
            continue
        if before.code == after.code and before.roles == after.roles:
            changes += last_s is not None and after.at_s - last_s < CHANGE_S
        last_s = after.at_s
    return changes


def _role_changes(looks: Sequence[Look]) -> tuple[int, int]:
    """Return how often workers' roles changed, and how often within `CHANGE_S` of a change the other way.

    A decode worker that is lent to prompts and becomes a prefill worker a moment later goes the same way twice.
    """
    last: dict[str, tuple[float, bool]] = {}
    changes = count = 0
    for before, after in pairwise(looks):
        were = dict(before.roles)
        for name, role in set(after.roles) - set(before.roles):
            if role in TOWARDS_PROMPTS and were.get(name) in TOWARDS_PROMPTS:
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
    """Print one line for each scene, and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="devices that are drawn; each scene is played on each")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--only", nargs="+", metavar="PART", help="scenes whose name has one of these parts")
    parser.add_argument("--mode", choices=MODES, help="only this mode")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="scenes that are played side by side")
    parser.add_argument("--out", type=Path, help="all results as JSON")
    parser.add_argument("--verbose", action="store_true", help="print each difference too")
    asked = parser.parse_args()
    began_s, found = time.monotonic(), list[SceneResult]()
    names = [each.name for each in SCENES if not asked.only or any(part in each.name for part in asked.only)]
    seeds = range(asked.seed, asked.seed + asked.seeds)
    plays = [(name, mode, seed) for seed in seeds for name in names for mode in ([asked.mode] if asked.mode else MODES)]
    with ProcessPoolExecutor(asked.jobs) as processes:
        for result in processes.map(run_scene, *zip(*plays, strict=True)):
            found.append(result)
            print(_line(result), flush=True)
            if asked.verbose:
                for each in filter(None, (*result.differences, result.green)):
                    print(f"      {each}")
    if asked.out:
        asked.out.write_text(json.dumps([asdict(each) for each in found]))
    print(json.dumps(summary(found, time.monotonic() - began_s)))


def summary(found: Sequence[SceneResult], took_s: float) -> dict[str, Any]:
    """Return the figures over all scenes."""
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
