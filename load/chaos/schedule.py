"""Which fault comes when: drawn from a seed before the run begins, so that a run's own course changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "kill worker", "kill worker for good", "stop worker", "freeze worker", "cut worker", "slow worker", "set role",
    "rival roles", "kill gateway", "freeze gateway", "cut gateway", "damage KV", "cut KV", "lose Redis", "Redis away",
    "registry late", "broker away", "kill planner", "kill metrics", "stop planner", "stop metrics", "freeze planner",
    "freeze metrics", "freeze Redis", "freeze broker",
]  # fmt: skip
WEIGHTS: dict[Kind, int] = {
    "kill worker": 10, "kill worker for good": 4, "stop worker": 5, "freeze worker": 10, "cut worker": 8,
    "slow worker": 8, "set role": 14, "rival roles": 6, "kill gateway": 2, "freeze gateway": 2, "cut gateway": 3,
    "damage KV": 6, "cut KV": 8, "lose Redis": 3, "Redis away": 3, "registry late": 3, "broker away": 4,
}  # fmt: skip
CONTROL_WEIGHTS: dict[Kind, int] = {
    "kill planner": 3, "kill metrics": 3, "stop planner": 1, "stop metrics": 1, "freeze planner": 3,
    "freeze metrics": 3, "freeze Redis": 2, "freeze broker": 3,
}  # fmt: skip
"""What happens to planner and metrics, and to what they hear by."""
ROLES = ("prefill", "decode", "mixed", "standby")


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them. `pick` chooses among what is there by then, 0..1."""

    at_s: float
    kind: Kind
    pick: float
    lasts_s: float
    role: str
    rival: str
    """The role that another one wants at the same moment."""


def draw_schedule(of: Mapping[Kind, int], random: Random, *, duration_s: float, every_s: float) -> list[Fault]:
    """Faults of these kinds, by their weights, at random moments, one each `every_s` on average."""
    kinds, weights = list(of), list(of.values())
    faults: list[Fault] = []
    at_s = random.expovariate(1 / every_s)
    while at_s < duration_s:
        faults.append(
            Fault(
                at_s=at_s,
                kind=random.choices(kinds, weights)[0],
                pick=random.random(),
                lasts_s=min(random.expovariate(1 / 1.0), 6.0),
                role=random.choices(ROLES, (4, 4, 3, 1))[0],
                rival=random.choice(ROLES),
            )
        )
        at_s += random.expovariate(1 / every_s)
    return faults
