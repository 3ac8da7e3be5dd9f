"""`make bench-spike`: play stories with a changing mix of work on live suites of simulated GPUs, one policy at a time.

Each policy serves the same requests at the same times on its own whole suite: gateway, sixteen workers in a few
processes, broker, Redis, planner and metrics. The bench prints the share of good requests, TTFT and TPOT, failures, and
the planner's moves. A turn is the arrival of the first request after the mix has changed. Its first useful move is the
first later decision that changes workers towards the phase that the new mix needs. An effect is the time from a
decision to the change, by the worker's own clock.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import httpx

from libs.cli.planner.in_lab import standing_before
from libs.contracts.errors import InvalidRequest
from libs.contracts.roles import role_from_name
from libs.lab.counterfactual import RoleAndBudget, counterfactual
from libs.lab.experiment import Experiment
from libs.lab.hardware import Hardware
from libs.lab.rivals.port import RivalSetting, Slo
from libs.lab.slo import SloSpec, parse_slo
from libs.lab.study import quiet
from libs.lab.traces.request import Trace
from libs.perfmodel.profiles import profile
from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.testing.suites.suite import RunningSuite
from load.lab.fidelity import ClusterShape, prompt_ids
from load.lab.fidelity_live import Answer, play, settings, sim_settings
from load.measure import bench_parser, percentiles
from load.planner.dynamo_live import DynamoLive
from load.planner.stories import SIZED_FOR, STORIES, Story, made
from load.setup import bench_suite

# The number of simulated workers in a process.
PER_PROCESS: Final = "8"


@dataclass(frozen=True, slots=True)
class LiveKind:
    """Workers of one kind, with the SLO of their clients."""

    place: ClusterShape
    """The shape of a cluster with one worker of the kind."""
    slo: SloSpec
    speedup: float = 1.0
    """The speed of a simulated GPU relative to its profile."""

    @property
    def step_time(self) -> StepTimeModel:
        return self.place.profile.step_time.scaled(1 / self.speedup)

    @property
    def speed(self) -> Speed:
        return Speed(self.step_time, self.place.chunk_tokens)

    def with_steps(self, steps: StepTimeModel) -> "LiveKind":
        """Return the kind with these step times, for the lab to simulate."""
        profile = replace(self.place.profile, step_time=steps)
        return replace(self, speedup=1.0, place=replace(self.place, profile=profile))

    def experiment(self, trace: Trace, workers: int, *, seed: int = 1) -> Experiment:
        """Return a lab experiment with the same requests on as many of these workers."""
        place = self.place
        return Experiment(
            trace,
            Hardware(replace(place.profile, step_time=self.step_time), mixed_measured=True),
            workers,
            self.slo,
            seed=seed,
            link_gbps=place.link_gbps / place.profile.gpus,
            chunk_tokens=place.chunk_tokens,
            max_sequences=place.max_sequences,
        )

    def env(self, trace: Trace) -> dict[str, str]:
        own = settings(self.place, trace) | sim_settings(self.place)
        return own | {"FULCRUM_WORKER_SIM_SPEEDUP": str(self.speedup)}


TTFT_MS: Final = 5_000
TPOT_MS: Final = 120
# The GPUs are slow, so that few requests a second fill sixteen of them, and two cores are enough for all processes.
SIM: Final = LiveKind(
    ClusterShape(
        profile("llama-70b-tp4-h100"), [(Role.PREFILL, 0)], chunk_tokens=2048, max_sequences=16, link_gbps=400.0
    ),
    parse_slo(f"ttft=max({TTFT_MS}ms,3x),tpot={TPOT_MS}ms"),
    speedup=0.4,
)
# The upper bound of judged decisions in a run. Each takes two runs of the lab.
MOST_JUDGED: Final = 64
# The reasons of decisions that reduce pressure. A decision that returns budgets after a calm has another reason.
PRESSED: Final = frozenset(("prompts_press", "decodes_press"))


def judged(
    decisions: list[dict[str, Any]],
    workers: list[dict[str, Any]],
    *,
    trace: Trace,
    kind: LiveKind,
    start_unix_ns: int,
    most: int = MOST_JUDGED,
) -> dict[str, bool]:
    """Return whether requests would have been slower without each decision that reduces pressure, by decision id.

    `workers` have the roles after all `decisions`.
    """
    experiment = kind.experiment(trace, len(workers))
    found: dict[str, bool] = {}
    for decision in [each for each in decisions if each["reason_code"] in PRESSED][:most]:
        standing = standing_before(decision, workers, decisions)
        names = sorted(standing)
        changes = {names.index(each["worker"]): _standing(each) for each in decision["changes"]}
        at_s = (decision["decided_unix_ns"] - start_unix_ns) / 1e9
        try:
            roles = [standing[name] for name in names]
            found[decision["id"]] = counterfactual(experiment, roles, changes, at_s).useful
        except InvalidRequest:
            continue  # no request came after it
    return found


def _standing(change: Mapping[str, Any]) -> RoleAndBudget:
    number, budget = role_from_name(change["role"], change["budget_tokens"])
    return RoleAndBudget(Role(number), budget)


# The interval between reads of the workers, short enough to see each change before the next one.
POLL_S: Final = 0.05
# The time for which a worker restarted by Dynamo's policy is away. It is a third of the lab's time, which favours
# Dynamo.
DYNAMO_START_S: Final = 10.0
# A move later than this after a turn does not count as its result.
TURN_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The roles and the planner's mode with which a suite is started."""

    name: str
    prefill: int
    decode: int
    mixed: int
    mode: str
    dynamo_start_s: float | None = None
    """The seconds for which a worker is away after Dynamo's load policy changes its role; None without that policy."""

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.mixed


def policies(workers: int) -> list[Policy]:
    half = workers // 2
    return [
        Policy("auto", half, workers - half, 0, "auto"),
        Policy(f"static {half}:{workers - half}", half, workers - half, 0, "advisory"),
        Policy("aggregated", 0, 0, workers, "advisory"),
        Policy("dynamo-load", half, workers - half, 0, "advisory", DYNAMO_START_S),
        Policy("dynamo-load+moves", half, workers - half, 0, "advisory", 0.0),
    ]


@dataclass(slots=True)
class Observations:
    start_unix_ns: int = 0
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed_ns: dict[tuple[str, int], int] = field(default_factory=dict)
    """The time of each change by the worker's own clock, by (worker, epoch)."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    dynamo_moves: list[tuple[int, str, str]] = field(default_factory=list)
    """(Unix ns, worker, new role) of each move by Dynamo's policy."""


async def watch(suite: RunningSuite, seen: Observations) -> None:
    url = suite.ready["planner"]
    async with httpx.AsyncClient(timeout=5) as http:
        while True:
            workers = seen.workers = (await http.get(f"{url}/v1/workers")).json()
            for worker in workers:
                seen.changed_ns[worker["id"], worker["epoch"]] = worker["moved_unix_ns"]
            for decision in (await http.get(f"{url}/v1/decisions", params={"limit": 50})).json():
                seen.decisions[decision["id"]] = decision
            await asyncio.sleep(POLL_S)


async def serve(
    suite: RunningSuite, trace: Trace, prompts: Sequence[Sequence[int]], dynamo: DynamoLive | None = None
) -> tuple[dict[int, Answer], list[str], Observations]:
    """Play the whole trace, and return answers, failures and observations."""
    seen, failed = Observations(), list[str]()
    watching = [asyncio.create_task(watch(suite, seen))]
    watching += [asyncio.create_task(dynamo.run())] if dynamo else []
    seen.start_unix_ns = time.time_ns()
    begun_ns = time.monotonic_ns()
    try:
        answers = await play(suite.gateway, suite.ready["model"], trace, prompts, failed)
        for each in watching:
            if each.done():
                each.result()  # a watcher never ends by itself, so raise its error
    finally:
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    seen.dynamo_moves = dynamo.moves if dynamo else []
    # The times of answers start with the first request's due time, which `play` sets after its preparations.
    first = min(answers.values(), key=lambda each: each.served.arrival_ns)
    seen.start_unix_ns += first.begun_ns - begun_ns
    return answers, failed, seen


def is_good(answer: Answer, trace: Trace, kind: LiveKind) -> bool:
    """Return whether an answer met the SLO, with TTFT by the client's clock."""
    tokens = trace.requests[answer.number].input_tokens
    limit_ns = kind.slo.ttft_limit_ns(kind.speed.prompt_ns(tokens, tokens**2))
    return answer.client_ttft_ns <= limit_ns and answer.served.tpot_ns <= kind.slo.tpot_ns


def moves(story: Story, trace: Trace, seen: Observations, useful: Mapping[str, bool] | None) -> dict[str, Any]:
    """Return the delays of decisions after turns, and of changes after decisions.

    `useful` is the lab's judgement by decision. If it is None, every decision with the matching reason code counts.
    """
    changes = changing(seen)
    useful_ms, first_ms = [], []
    for at_s, phase in story.turns:
        arrivals = [each.arrival_ns for each in trace.requests if each.arrival_ns >= at_s * 1e9]
        if not arrivals:
            continue
        turn_ns = seen.start_unix_ns + arrivals[0]
        code = "prompts_press" if phase == "prefill" else "decodes_press"
        fits = [each for each in changes if each["reason_code"] == code]
        first_ms.append(_soonest_ms(fits, turn_ns))
        useful_ms.append(_soonest_ms([each for each in fits if useful is None or useful.get(each["id"])], turn_ns))
    effects_ms = [
        (changed - decision["decided_unix_ns"]) / 1e6
        for decision in changes
        for each in decision["changes"]
        if (changed := seen.changed_ns.get((each["worker"], each["epoch"]), 0))
    ]
    return {
        "decisions": len(changes),
        "useful": None if useful is None else [sum(useful.values()), len(useful)],
        "moves": sum(len(each["workers"]) for each in changes if each["action"] == "set_role"),
        "budgets": sum(len(each["workers"]) for each in changes if each["action"] == "set_budget"),
        "turns": len(useful_ms),
        "turns_answered": sum(each is not None for each in useful_ms),
        "first_move_ms": percentiles([each for each in first_ms if each is not None]),
        "first_useful_move_ms": percentiles([each for each in useful_ms if each is not None]),
        "effect_ms": percentiles(effects_ms),
    }


def _soonest_ms(decisions: Sequence[Mapping[str, Any]], turn_ns: int) -> float | None:
    after_ns = [each["decided_unix_ns"] - turn_ns for each in decisions]
    soonest = min((each for each in after_ns if 0 <= each < TURN_S * 1e9), default=None)
    return None if soonest is None else soonest / 1e6


def changing(seen: Observations) -> list[dict[str, Any]]:
    """Return the decisions that changed workers, in order."""
    found = [each for each in seen.decisions.values() if each["action"] in ("set_role", "set_budget")]
    return sorted(found, key=lambda each: (each["decided_unix_ns"], each["sequence"]))


def run(
    policy: Policy,
    story: Story,
    *,
    seed: int,
    ttft_ms: int = TTFT_MS,
    kind: LiveKind = SIM,
    most_judged: int = MOST_JUDGED,
) -> dict[str, Any]:
    """Run one policy on one story. `ttft_ms` is the gateway's deadline; requests are scored by the kind's SLO."""
    trace = made(story, seed)
    prompts = prompt_ids(trace, seed=seed)
    cluster = RivalSetting(
        policy.workers, kind.speed, kind.place.max_sequences, 1_000, 64,
        Slo(kind.slo.ttft_limit_ns(0), kind.slo.tpot_ns),
    )  # fmt: skip
    roles = ("--prefill", str(policy.prefill), "--decode", str(policy.decode), "--mixed", str(policy.mixed))
    env = {"FULCRUM_PLANNER_MODE": policy.mode, "FULCRUM_GATEWAY_TTFT_DEADLINE_MS": str(ttft_ms)}
    env |= {"FULCRUM_GATEWAY_TPOT_TARGET_MS": str(TPOT_MS), "FULCRUM_PLANNER_TPOT_TARGET_MS": str(TPOT_MS)}
    with bench_suite(
        "--engine", "sim", "--workers-per-process", PER_PROCESS, *roles, env=env | kind.env(trace)
    ) as suite:
        start_s = policy.dynamo_start_s
        dynamo = None if start_s is None else DynamoLive(suite, cluster, start_s)
        answers, failed, seen = asyncio.run(serve(suite, trace, prompts, dynamo))
    useful = None
    if policy.mode == "auto":
        useful = judged(
            changing(seen), seen.workers, trace=trace, kind=kind, start_unix_ns=seen.start_unix_ns, most=most_judged
        )
    good = sum(is_good(each, trace, kind) for each in answers.values())
    return {
        "policy": policy.name,
        "requests": len(trace.requests),
        "good": good / len(trace.requests),
        "failed": len(failed),
        "refused": len(trace.requests) - len(answers) - len(failed),
        "errors": failed[:3],
        "ttft_ms": percentiles([each.client_ttft_ns / 1e6 for each in answers.values()]),
        "tpot_ms": percentiles([each.served.tpot_ns / 1e6 for each in answers.values() if each.served.tpot_ns]),
        "client_late_ms": max(each.late_ns for each in answers.values()) / 1e6,
        "dynamo_moves": len(seen.dynamo_moves),
        **(moves(story, trace, seen, useful) if policy.mode == "auto" else {}),
    }


def print_row(found: dict[str, Any]) -> str:
    """Return a line of the table below `HEAD`."""

    def two(name: str) -> str:
        each = found.get(name)
        return f"{each['p50']:>7.0f} {each['p99']:>7.0f}" if each else f"{'–':>7} {'–':>7}"

    turns = f"{found['turns_answered']}/{found['turns']}" if "turns" in found else "–"
    moved = f"{found['moves']:>4} {found['budgets']:>4}" if "moves" in found else f"{'–':>4} {'–':>4}"
    return (
        f"{found['policy']:<17} {found['requests']:>6} {found['good']:>7.1%} {found['failed']:>6} {two('ttft_ms')} "
        f"{two('tpot_ms')} {turns:>6} {two('first_useful_move_ms')} {two('effect_ms')} {moved}"
    )


_TIMES: Final = ("TTFT ms", "TPOT ms")
HEAD: Final = "\n".join(
    (
        " " * 40 + " ".join(f"{each:>15}" for each in _TIMES) + " " * 8 + " first useful ms       effect ms",
        f"{'policy':<17} {'asked':>6} {'good':>7} {'failed':>6} "
        + " ".join(["    p50     p99"] * 2)
        + f" {'turns':>6} "
        + " ".join(["    p50     p99"] * 2)
        + f" {'role':>4} {'budg':>4}",
    )
)


def main() -> None:
    parser = bench_parser(
        __doc__, workers=SIZED_FOR, size=(0.0, "of the stories; 0: as many as the workers are to 16"), seconds=60,
        seed=1, judged=(MOST_JUDGED, "decisions that the lab judges, two runs each"),
    )  # fmt: skip
    parser.add_argument("--stories", nargs="+", choices=STORIES, default=["flipflop", "flood", "bursts"])
    parser.add_argument(
        "--policies", nargs="+", help="of auto, static, aggregated, dynamo-load, dynamo-load+moves; all by default"
    )
    options = parser.parse_args()
    quiet()
    found: dict[str, list[dict[str, Any]]] = {}
    began = datetime.now()
    workers, kind = options.workers, SIM
    size = options.size or workers / SIZED_FOR
    for name in options.stories:
        story = STORIES[name](options.seconds, size)
        print(f"\n{name}: {story.spec}, {workers} workers of {kind.place.profile.name}, SLO {kind.slo.text}\n{HEAD}")
        for policy in policies(workers):
            if options.policies and policy.name.split()[0] not in options.policies:
                continue
            print(f"{policy.name} serves {name} ...", file=sys.stderr, flush=True)
            row = run(policy, story, seed=options.seed, kind=kind, most_judged=options.judged)
            found.setdefault(name, []).append(row)
            print(print_row(row), flush=True)
            for error in row["errors"]:
                print(f"  {error}")
    took_s = (datetime.now() - began).total_seconds()
    print(json.dumps({"workers": workers, "seconds": options.seconds, "took_s": took_s, "stories": found}))


if __name__ == "__main__":
    main()
