"""Policies by name: Fulcrum's own, and rivals."""

from collections.abc import Callable
from dataclasses import dataclass

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.port import Cluster, Rival
from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cluster is run. Without a rival, the live dispatcher with its credits runs it."""

    name: str
    first_roles: Callable[[Cluster], list[tuple[Role, int]]]
    rival: Rival | None = None
    guard: bool = True
    """Whether prompts and newcomers are held to the TPOT of what decodes."""


def fulcrum(prefill: int, decode: int) -> Policy:
    """As it is today: live binding and pacing, roles that stand still."""
    roles = [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, 0)] * decode
    return Policy(f"fulcrum:{prefill}:{decode}", lambda cluster: roles)


def of_rival(rival: Rival, *, guard: bool = False) -> Policy:
    """A rival as shipped, or with our decode guard and chunk budget."""

    def roles(cluster: Cluster) -> list[tuple[Role, int]]:
        return [(move.role, move.budget_tokens) for move in rival.first_roles(cluster)]

    name = f"{rival.name}+guard" if guard else rival.name
    return Policy(name, roles, rival, guard=guard or rival.guard)


def split_of(text: str, workers: int) -> tuple[int, int]:
    """`9:7` as (9, 7); raises InvalidRequest where that is not what there is."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a split such as 9:7, prefill before decode, at least one of each")
    prefill, decode = int(parts[0]), int(parts[1])
    if prefill + decode != workers:
        raise InvalidRequest(f"a split of {text} is {prefill + decode} workers, and there are {workers}")
    return prefill, decode
