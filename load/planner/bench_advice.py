"""`make bench-advice`: what the planner's advice promises, against what it brings in the lab, seed by seed.

A cluster in virtual time gets into a situation that calls for advice, takes it on the way, and the figure that was
promised is measured as the planner measures it: pressure as seen ten seconds later, or prompt tokens a second of busy
prefill time. Prints how many effects lie in their ranges, how wide those are beside the effect, and the mean interval
score: the width, and for an effect outside 2 / (1 - confidence) times its distance; lower is better.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Final

from libs.lab.cluster.run import PlannedLoss, PlannedMove
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import by_name
from libs.lab.policies import Policy
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.lab.traces.generate import generate
from libs.policy.planner.advice import Advice, AdviceKind, advise, mean_of, settled
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.role_planning import RolePlan
from libs.policy.planner.scaling import workers_needed
from libs.policy.pressure.splits import Split, WorkerProfile, Workload
from libs.policy.roles import Role
from services.planner.scaling.advisor import CAME_NS, LOOKS

PROFILE: Final = "llama-70b-tp4-h100"
SLO: Final = "ttft=5s,tpot=100ms"
AT_S: Final = 40.0
"""When the advice is taken: the situation has stood for long."""
SECONDS: Final = 52
MAX_SEQUENCES: Final = 32
"""Of a worker: so few that decodes can press at rates that are quickly simulated."""
AIM: Final = 0.8
Looks = list[tuple[int, Workload, RolePlan]]


@dataclass(frozen=True, slots=True)
class Situation:
    """What calls for an advice."""

    kind: AdviceKind
    spec: str
    roles: Sequence[tuple[Role, int]]
    chunk_tokens: int = 2048


def _split(prefill: int, mixed: int, budget: int = 0) -> list[tuple[Role, int]]:
    return [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, budget)] * mixed


SITUATIONS: Final = (
    Situation(AdviceKind.ADD_WORKERS, f"poisson:rate=14,isl=4000,osl=20,spread=0.4,seconds={SECONDS}", _split(2, 2)),
    Situation(AdviceKind.ADD_WORKERS, f"poisson:rate=18,isl=400,osl=300,spread=0.4,seconds={SECONDS}", _split(2, 2)),
    Situation(AdviceKind.CHUNK, f"poisson:rate=4,isl=2000,osl=10,spread=0.4,seconds={SECONDS}", _split(2, 2), 128),
    Situation(AdviceKind.AGGREGATE, f"poisson:rate=15,isl=100,osl=300,spread=0.4,seconds={SECONDS}", _split(1, 3)),
)


@dataclass(frozen=True, slots=True)
class Promise:
    """One advice, and what it brought."""

    kind: str
    seed: int
    what: str
    low: float
    high: float
    came: float
    confidence: float

    @property
    def held(self) -> bool:
        """Whether the effect lies in its range."""
        return self.low <= self.came <= self.high

    @property
    def score(self) -> float:
        """Interval score over the size of the effect."""
        beyond = max(self.low - self.came, self.came - self.high, 0.0)
        return (self.high - self.low + 2 / (1 - self.confidence) * beyond) / max(abs(self.came), 1e-9)


def experiment(situation: Situation, seed: int) -> Experiment:
    """The cluster as it is before the advice."""
    return Experiment(
        trace=generate(situation.spec, seed=seed),
        hardware=by_name(PROFILE),
        workers=len(situation.roles),
        slo=parse_slo(SLO),
        seed=seed,
        chunk_tokens=situation.chunk_tokens,
        max_sequences=MAX_SEQUENCES,
        overtime_s=30.0,
    )


def lived(asked: Experiment, roles: Sequence[tuple[Role, int]]) -> tuple[Looks, float]:
    """What the planner saw, and prompt tokens a second of a worker that is busy with prompts."""
    looks: Looks = []
    policy = Policy("fulcrum-auto", lambda _: list(roles), planned=True, on_look=lambda *each: looks.append(each))
    report, result = run(asked, policy)
    tokens = sum(each.request.input_tokens for each in result.answers if each.tokens)
    busy_s = report.gpu_seconds["prefill"] / asked.hardware.profile.gpus
    return looks, tokens / max(busy_s, 1e-9)


def around(looks: Looks, at_s: float) -> tuple[Workload, Split]:
    """As the advisor sees it at a moment: the mean over its last looks."""
    first_ns = looks[0][0]
    seen = []
    for back in reversed(range(LOOKS)):
        at_ns = first_ns + round((at_s - back) * 1e9)
        seen.append(next((work, plan.now) for when, work, plan in reversed(looks) if when <= at_ns))
    now = seen[-1][1]
    return mean_of([each for each in seen if (each[1].prefill, each[1].mixed) == (now.prefill, now.mixed)])


def advice_of(situation: Situation, asked: Experiment, looks: Looks) -> tuple[Advice, float] | None:
    """What the planner says at `AT_S`, and the pressure then."""
    shape = asked.shape(Policy("", lambda _: []))
    kv_tokens = shape.kv_blocks * shape.block_tokens
    engine = WorkerProfile(shape.step_time, shape.chunk_tokens, shape.max_sequences, kv_tokens)
    work, now = around(looks, AT_S)
    needed = workers_needed(engine, settled(work), now.prefill + now.mixed, ModelLimits())
    advised = advise("m", engine, work, now, ModelLimits(), needed=needed)
    found = next((each for each in advised if each.kind is situation.kind), None)
    return (found, now.pressure) if found else None


def taken(situation: Situation, asked: Experiment, advice: Advice) -> tuple[Looks, float]:
    """The same demand with the advice taken at `AT_S`."""
    if situation.kind is AdviceKind.CHUNK:
        tokens = int(advice.command.partition("=")[2])
        return lived(replace(asked, chunk_tokens=tokens), situation.roles)
    if situation.kind is AdviceKind.AGGREGATE:
        budget = asked.speed.chunk_tokens
        moves = tuple(PlannedMove(AT_S, index, Role.MIXED, budget) for index in range(asked.workers))
        return lived(replace(asked, moves=moves), situation.roles)
    words = advice.what.replace("(", "").replace(")", "").replace(":", "").split()
    more = int(words[1])
    prefill = next((int(words[at - 2]) for at, word in enumerate(words) if word == "prefill"), 0)
    prefill = min(prefill, more)
    new = _split(prefill, more - prefill)
    # Until then they are not there: dead from the start, and back with their roles.
    losses = tuple(PlannedLoss(0.0, asked.workers + index, AT_S) for index in range(more))
    return lived(replace(asked, workers=asked.workers + more, losses=losses), [*situation.roles, *new])


def promise(situation: Situation, seed: int) -> Promise | None:
    """One seed; None where nothing is advised."""
    asked = experiment(situation, seed)
    looks, speed = lived(asked, situation.roles)
    found = advice_of(situation, asked, looks)
    if found is None:
        return None
    advice, pressure = found
    later, speed_later = taken(situation, asked, advice)
    came = speed_later - speed
    if situation.kind is not AdviceKind.CHUNK:
        came = around(later, AT_S + CAME_NS / 1e9)[1].pressure - pressure
    return Promise(situation.kind.value, seed, advice.what, advice.low, advice.high, came, advice.confidence)


def summary(promises: Sequence[Promise]) -> dict[str, Any]:
    """Over seeds."""
    return {
        "seeds": len(promises),
        "held": sum(each.held for each in promises),
        "width_of_effect": median((each.high - each.low) / max(abs(each.came), 1e-9) for each in promises),
        "interval_score_of_effect": fmean(each.score for each in promises),
    }


def main() -> None:
    """Print a row a seed, a line a situation, and one JSON line; exit code 1 where fewer than the aim held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--verbose", action="store_true", help="each seed's promise")
    asked = parser.parse_args()
    quiet()
    found: dict[str, Mapping[str, Any]] = {}
    missed = False
    for situation in SITUATIONS:
        promises = [each for seed in range(asked.seeds) if (each := promise(situation, seed)) is not None]
        print(f"{situation.kind.value}: {situation.spec}")
        for each in promises if asked.verbose else ():
            print(f"  {each.seed:>3} {each.low:>10.3f} to {each.high:>10.3f}, came {each.came:>10.3f}"
                  f" {'' if each.held else 'MISSED'}  {each.what}")  # fmt: skip
        row = summary(promises) if promises else {"seeds": 0, "held": 0}
        found[f"{situation.kind.value} {situation.spec}"] = row
        missed = missed or not promises or row["held"] < AIM * len(promises) or row["width_of_effect"] > 1
        print("  " + ", ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                               for name, value in row.items()), flush=True)  # fmt: skip
    print(json.dumps({"bench": "advice", "situations": found}))
    sys.exit(missed)


if __name__ == "__main__":
    main()
