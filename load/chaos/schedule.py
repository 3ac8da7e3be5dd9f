"""Which fault comes when: drawn from a seed before the run begins, so that a run's own course changes nothing."""

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "kill worker", "kill worker for good", "stop worker", "freeze worker", "cut worker", "slow worker", "set role",
    "rival roles", "kill gateway", "freeze gateway", "cut gateway", "damage KV", "cut KV", "lose Redis", "Redis away",
    "registry late", "broker away",
]  # fmt: skip
WEIGHTS: dict[Kind, int] = {
    "kill worker": 10, "kill worker for good": 4, "stop worker": 5, "freeze worker": 10, "cut worker": 8,
    "slow worker": 8, "set role": 14, "rival roles": 6, "kill gateway": 2, "freeze gateway": 2, "cut gateway": 3,
    "damage KV": 6, "cut KV": 8, "lose Redis": 3, "Redis away": 3, "registry late": 3, "broker away": 4,
}  # fmt: skip
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


def draw_schedule(random: Random, *, duration_s: float, every_s: float) -> list[Fault]:
    """Faults at random moments, one each `every_s` on average."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
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
