"""Policies by name: Fulcrum's own, and rivals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.planner import OnLook
from libs.lab.rivals.catalog import RIVALS, rival
from libs.lab.rivals.port import MoveCost, PromptOrder, PromptTurn, QueuedPrompt, Rival, RivalSetting
from libs.policy.queue.making_room import PACE_COUNTED_ON, Due, making_room
from libs.policy.queue.order import hopeless_from_ns
from libs.policy.roles import Role

GUARD, MOVES, ORDER, OURS = "+guard", "+moves", "+order", "+ours"
"""After a rival's name: with our decode guard; with our role moves, which restart nothing; with our order in each
worker's queue of prompts; with our order, late binding, guard and moves, so that its split and its mover alone are its
own."""
EXTRAS: Final = (GUARD, MOVES, ORDER, OURS)
NO_ORDER, NO_GUARD = "-order", "-guard"
"""After one of ours: without late-last order; without the decode guard and the slack budget."""
LACKS: Final = (NO_ORDER, NO_GUARD)
STILL: Final = "fulcrum"
"""With a split: roles stand still."""
MIXED: Final = "fulcrum-mixed"
"""All workers mixed, or with a split those that decode."""
FCFS: Final = "fulcrum-fcfs"
"""With a split: roles stand still, and nobody is put before who came first, however late: what was before ADR 49."""
AUTO: Final = "fulcrum-auto"
"""The planner moves workers, from an even split or the one that is named."""
OFFLINE: Final = "offline"
"""The best schedule found by who knows the trace (libs/lab/offline.py)."""
HINDSIGHT: Final = (STILL, "static", OFFLINE)
"""Without a split: the best one in hindsight."""
ALL: Final = (STILL, MIXED, "static", *(name for name in RIVALS if name != "static"))


@dataclass(frozen=True, slots=True)
class Policy:
    """How a cluster is run. Without a rival, the live dispatcher with its credits runs it."""

    name: str
    first_roles: Callable[[RivalSetting], list[tuple[Role, int]]]
    rival: Rival | None = None
    guard: bool = True
    """Whether prompts and newcomers are held to the TPOT of what decodes."""
    planned: bool = False
    """Whether the live planner's decision moves roles and budgets."""
    ours: bool = False
    """Whether the live dispatcher runs it though a rival's mover decides about roles."""
    late_last: bool = True
    """Whether requests that can no longer be in time wait behind those that can."""
    prompt_order: PromptOrder | None = None
    """Of the prompts in a rival's workers; None: as they came."""
    on_look: OnLook | None = None
    """Called with each decision of the planner, where it is `planned`."""


def policy_named(name: str, workers: int) -> Policy:
    """One with its split, e.g. fulcrum:9:7, static:9:7, arrow, aggregated:512, dynamo-load+ours. Raises InvalidRequest
    that lists what there is."""
    if workers < 2:
        raise InvalidRequest(f"{workers} workers cannot be split into prefill and decode: name two or more")
    bare, extras = bare_name(name)
    if lacking := [lack for lack in LACKS if lack in extras]:
        return _without(policy_named(bare, workers), name, lacking)
    kind, colon, split = bare.partition(":")
    if kind in (AUTO, MIXED, FCFS) or (kind == STILL and colon):
        halves = (0, workers) if kind == MIXED else (workers // 2, workers - workers // 2)
        return _fulcrum(
            bare,
            *(split_of(split, workers) if colon else halves),
            mixed=kind == MIXED,
            planned=kind == AUTO,
            late_last=kind != FCFS,
        )
    try:
        found = rival(bare)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{error.message}; and fulcrum, fulcrum:P:D, {MIXED}, {MIXED}:P:D, each rival with {', '.join(EXTRAS)}, "
            f"each of ours with {', '.join(LACKS)}"
        ) from None
    if bare.startswith("static:"):
        split_of(bare.removeprefix("static:"), workers)
    if MOVES in extras or OURS in extras:
        found = replace(found, move_cost=MoveCost())
    made = _of_rival(found, name, guard=GUARD in extras or OURS in extras, ours=OURS in extras)
    return replace(made, prompt_order=late_prompts_last if ORDER in extras else made.prompt_order)


def _without(policy: Policy, name: str, lacking: list[str]) -> Policy:
    """One of ours, for what a part of it is worth."""
    if policy.rival is not None:
        raise InvalidRequest(
            f"{name!r}: {', '.join(LACKS)} are of Fulcrum's own policies; rivals have {', '.join(EXTRAS)}"
        )
    return replace(
        policy, name=name, guard=NO_GUARD not in lacking, late_last=policy.late_last and NO_ORDER not in lacking
    )


def bare_name(name: str) -> tuple[str, str]:
    """(`dynamo-load:9:7`, `+moves+guard`) of `dynamo-load:9:7+moves+guard`."""
    bare = name
    while extra := next((each for each in (*EXTRAS, *LACKS) if bare.endswith(each)), ""):
        bare = bare.removesuffix(extra)
    return bare, name[len(bare) :]


def with_split(name: str, prefill: int, decode: int) -> str:
    """`static+guard` with a split is `static:9:7+guard`."""
    bare, extras = bare_name(name)
    return f"{bare}:{prefill}:{decode}{extras}"


def has_hindsight(name: str) -> bool:
    """Whether its split is to be found by trying."""
    return bare_name(name)[0] in HINDSIGHT


def split_of(text: str, workers: int) -> tuple[int, int]:
    """`9:7` as (9, 7); raises InvalidRequest where that is not what there is."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a split such as 9:7, prefill before decode, at least one of each")
    prefill, decode = int(parts[0]), int(parts[1])
    if prefill + decode != workers:
        raise InvalidRequest(f"a split of {text} is {prefill + decode} workers, and there are {workers}")
    return prefill, decode


def _fulcrum(name: str, prefill: int, decode: int, *, mixed: bool, planned: bool, late_last: bool = True) -> Policy:
    """Live order, binding and pacing. `mixed`: decode workers compute prompts too, as far as the TPOT of what they
    decode leaves time. Roles stand still where they are not `planned`."""

    def roles(cluster: RivalSetting) -> list[tuple[Role, int]]:
        budget_tokens = cluster.speed.chunk_tokens if mixed else 0
        return [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, budget_tokens)] * decode

    return Policy(name, roles, planned=planned, late_last=late_last)


def _of_rival(found: Rival, name: str, *, guard: bool, ours: bool) -> Policy:
    def roles(cluster: RivalSetting) -> list[tuple[Role, int]]:
        return [(move.role, move.budget_tokens) for move in found.first_roles(cluster)]

    return Policy(name, roles, found, guard=guard or found.guard, ours=ours, prompt_order=found.prompt_order)


def late_prompts_last(prompts: Sequence[QueuedPrompt], turn: PromptTurn) -> list[tuple[float, ...]]:
    """Fulcrum's own order of its gateways, in a worker's queue: what has begun, prompts that can be in time, those that
    make room for them, late ones. The share that gateways leave to late ones (`LATE_SHARE`) is left out, to the
    advantage of others."""
    latest_ns = [hopeless_from_ns(prompt, prompt.left_ns) for prompt in prompts]
    late = [each <= turn.now_ns for each in latest_ns]
    aside: set[int] = set()
    if turn.pace:
        order = sorted(range(len(prompts)), key=lambda at: (not prompts[at].resumed, prompts[at].arrival_unix_ns))
        hopeful = (Due(at, prompts[at].flow, round(prompts[at].left_ns), latest_ns[at]) for at in order if not late[at])
        aside = making_room(hopeful, round(turn.starts_ns), PACE_COUNTED_ON * turn.pace)
    return [(not prompt.resumed, late[at], at in aside, prompt.arrival_unix_ns) for at, prompt in enumerate(prompts)]
