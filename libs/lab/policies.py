"""Lookup of policies by name: Fulcrum's own, and rivals such as `static:9:7` or `aggregated:512`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.planner import OnLook
from libs.lab.rivals.arrow import arrow
from libs.lab.rivals.dynamo import dynamo
from libs.lab.rivals.llm_d import llm_d
from libs.lab.rivals.llm_d_latency import llm_d_latency
from libs.lab.rivals.port import MoveCost, PromptOrder, PromptTurn, QueuedPrompt, Rival, RivalSetting
from libs.lab.rivals.sglang_flip import sglang_flip
from libs.lab.rivals.sglang_pdmux import sglang_pdmux
from libs.lab.rivals.splits import aggregated, niyama, static_split
from libs.lab.rivals.taichi import taichi
from libs.policy.gateway.order import PACE_COUNTED_ON, QueuedRequest, hopeless_from_ns, making_room
from libs.policy.roles import Role


@dataclass(frozen=True, slots=True)
class RivalKind:
    """A rival and the numbers that its name may carry."""

    make: Callable[..., Rival]
    forms: tuple[str, ...]
    """The permitted forms of the numbers, each a list of their names joined by colons."""

    def usage(self, name: str) -> str:
        """Return every permitted form of the name."""
        return ", ".join(f"{name}:{form}" if form else name for form in self.forms)


SPLIT: Final = ("", "P:D")
BUDGET: Final = ("", "BUDGET_TOKENS")
RESTARTED: Final = ("", "P:D", "P:D:START_S")

RIVALS: Final[Mapping[str, RivalKind]] = MappingProxyType(
    {
        "static": RivalKind(static_split, ("P:D",)),
        "aggregated": RivalKind(aggregated, BUDGET),
        "arrow": RivalKind(arrow, SPLIT),
        "dynamo-load": RivalKind(partial(dynamo, "load"), RESTARTED),
        "dynamo-throughput": RivalKind(partial(dynamo, "throughput"), RESTARTED),
        "dynamo-both": RivalKind(partial(dynamo, "both"), RESTARTED),
        "llm-d": RivalKind(llm_d, RESTARTED),
        "llm-d-throughput": RivalKind(partial(llm_d, throughput=True), RESTARTED),
        "llm-d-latency": RivalKind(llm_d_latency, BUDGET),
        "llm-d-latency-most": RivalKind(partial(llm_d_latency, most=True), BUDGET),
        "niyama": RivalKind(niyama, ("",)),
        "sglang-flip": RivalKind(sglang_flip, SPLIT),
        "sglang-pdmux": RivalKind(sglang_pdmux, ("",)),
        "taichi": RivalKind(taichi, ("", "P:D", "P:D:BUDGET_TOKENS")),
        "taichi-flow": RivalKind(partial(taichi, flow=True), ("", "P:D", "P:D:BUDGET_TOKENS")),
    }
)


def rival(name: str) -> Rival:
    """Return the rival with this name; raise InvalidRequest, which lists all names, if there is none."""
    kind_name, *numbers = name.split(":")
    kind = RIVALS.get(kind_name)
    if kind is None or not any(len(numbers) == len(form.split(":") if form else []) for form in kind.forms):
        raise InvalidRequest(f"no rival {name!r}; there are: {names()}")
    if not all(number.isascii() and number.isdigit() and len(number) < 10 and int(number) for number in numbers):
        raise InvalidRequest(f"{name!r} has whole numbers above 0 after its colons; there are: {names()}")
    return kind.make(*(int(number) for number in numbers))


def names() -> str:
    """Return the forms in which each rival can be named."""
    return ", ".join(kind.usage(name) for name, kind in RIVALS.items())


GUARD, MOVES, ORDER, OURS = "+guard", "+moves", "+order", "+ours"
"""Suffixes of a rival's name, each of which adds one of our parts.

- guard: the decode guard.
- moves: role moves that restart nothing.
- order: our order in each worker's queue of prompts.
- ours: order, late binding, guard and moves, so that only the split and the mover are the rival's.
"""
EXTRAS: Final = (GUARD, MOVES, ORDER, OURS)
NO_ORDER, NO_GUARD = "-order", "-guard"
"""Suffixes of Fulcrum's policies: without late-last order, and without the decode guard and the slack budget."""
LACKS: Final = (NO_ORDER, NO_GUARD)
STILL: Final = "fulcrum"
"""Fulcrum with fixed roles, for a given split."""
MIXED: Final = "fulcrum-mixed"
"""All workers mixed, or only the decode workers of a split."""
FCFS: Final = "fulcrum-fcfs"
"""Fixed roles and strict first come, first served, regardless of lateness: the behaviour before ADR 49."""
AUTO: Final = "fulcrum-auto"
"""The planner moves workers, starting from an even split or the named one."""
OFFLINE: Final = "offline"
"""The best schedule of a search that knows the trace (libs/lab/offline.py)."""
HINDSIGHT: Final = (STILL, "static", OFFLINE)
"""Policies that use the best split in hindsight if their name has none."""
AGGREGATED: Final = ("aggregated", "niyama", "llm-d-latency", "llm-d-latency-most", "sglang-pdmux", MIXED)
Design = Literal["aggregated", "disaggregated", "hybrid"]
"""The division of phases: all workers do both, each does one, or each mainly does one and partly the other."""
ALL: Final = (STILL, MIXED, "static", *(name for name in RIVALS if name != "static"))


@dataclass(frozen=True, slots=True)
class Policy:
    """The configuration of a cluster. Without a rival, the live dispatcher runs it with its credits."""

    name: str
    first_roles: Callable[[RivalSetting], list[tuple[Role, int]]]
    rival: Rival | None = None
    guard: bool = True
    """True if prompts and new sequences are limited to protect the TPOT of running decodes."""
    planned: bool = False
    """True if the live planner's decisions move roles and budgets."""
    ours: bool = False
    """True if the live dispatcher runs although a rival's mover decides about roles."""
    late_last: bool = True
    """True if requests that can no longer be in time wait behind those that can."""
    prompt_order: PromptOrder | None = None
    """The order of prompts in a rival's workers; None for first come, first served."""
    on_look: OnLook | None = None
    """The callback for each decision of the planner, if the policy is `planned`."""


def policy_named(name: str, workers: int) -> Policy:
    """Return the policy of a name such as fulcrum:9:7, static:9:7, arrow, aggregated:512 or dynamo-load+ours.

    Raise InvalidRequest, which lists the available names.
    """
    bare, extras = bare_name(name)
    if workers < 2 and design_of(name) != "aggregated":
        raise InvalidRequest(f"{workers} workers cannot be split into prefill and decode: name two or more")
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
    """Return one of Fulcrum's policies with the named parts removed, to measure their value."""
    if policy.rival is not None:
        raise InvalidRequest(
            f"{name!r}: {', '.join(LACKS)} are of Fulcrum's own policies; rivals have {', '.join(EXTRAS)}"
        )
    return replace(
        policy, name=name, guard=NO_GUARD not in lacking, late_last=policy.late_last and NO_ORDER not in lacking
    )


def bare_name(name: str) -> tuple[str, str]:
    """Split a name: (`dynamo-load:9:7`, `+moves+guard`) for `dynamo-load:9:7+moves+guard`."""
    bare = name
    while extra := next((each for each in (*EXTRAS, *LACKS) if bare.endswith(each)), ""):
        bare = bare.removesuffix(extra)
    return bare, name[len(bare) :]


def design_of(name: str) -> Design:
    """Return the division of phases under a policy with this name."""
    kind, _, numbers = bare_name(name)[0].partition(":")
    if kind in ("taichi", "taichi-flow") or (kind == MIXED and numbers):
        return "hybrid"
    return "aggregated" if kind in AGGREGATED else "disaggregated"


def with_split(name: str, prefill: int, decode: int) -> str:
    """Insert a split into a policy's name: `static+guard` becomes `static:9:7+guard`."""
    bare, extras = bare_name(name)
    return f"{bare}:{prefill}:{decode}{extras}"


def has_hindsight(name: str) -> bool:
    """Return whether the policy's split must be found by trying."""
    return bare_name(name)[0] in HINDSIGHT


def split_of(text: str, workers: int) -> tuple[int, int]:
    """Parse `9:7` as (9, 7); raise InvalidRequest if it does not match the number of workers."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a split such as 9:7, prefill before decode, at least one of each")
    prefill, decode = int(parts[0]), int(parts[1])
    if prefill + decode != workers:
        raise InvalidRequest(f"a split of {text} is {prefill + decode} workers, and there are {workers}")
    return prefill, decode


def _fulcrum(name: str, prefill: int, decode: int, *, mixed: bool, planned: bool, late_last: bool = True) -> Policy:
    """Return a policy with live order, binding and pacing.

    If `mixed`, decode workers also compute prompts as far as the TPOT of their decodes leaves time. Unless `planned`,
    roles are fixed.
    """

    def roles(cluster: RivalSetting) -> list[tuple[Role, int]]:
        budget_tokens = cluster.speed.chunk_tokens if mixed else 0
        return [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, budget_tokens)] * decode

    return Policy(name, roles, planned=planned, late_last=late_last)


def _of_rival(found: Rival, name: str, *, guard: bool, ours: bool) -> Policy:
    def roles(cluster: RivalSetting) -> list[tuple[Role, int]]:
        return [(move.role, move.budget_tokens) for move in found.first_roles(cluster)]

    return Policy(name, roles, found, guard=guard or found.guard, ours=ours, prompt_order=found.prompt_order)


def late_prompts_last(prompts: Sequence[QueuedPrompt], turn: PromptTurn) -> list[tuple[float, ...]]:
    """Return the sort keys of Fulcrum's gateway order, applied to one worker's queue of prompts.

    Prompts in progress come first, then those that can be in time, those that make room for them, and late ones. The
    share that gateways reserve for late ones (`LATE_SHARE`) is left out, which favours the others. Classes make room
    only for themselves, since a worker does not know the share of each that is in time.
    """
    latest_ns = [hopeless_from_ns(prompt, prompt.left_ns) for prompt in prompts]
    late = [each <= turn.now_ns for each in latest_ns]
    aside: set[int] = set()
    if turn.pace:
        order = sorted(range(len(prompts)), key=lambda at: (not prompts[at].resumed, prompts[at].arrival_unix_ns))
        hopeful = (
            QueuedRequest(at, prompts[at].flow, round(prompts[at].left_ns), latest_ns[at])
            for at in order
            if not late[at]
        )
        aside = making_room(hopeful, round(turn.starts_ns), PACE_COUNTED_ON * turn.pace)
    return [(not prompt.resumed, late[at], at in aside, prompt.arrival_unix_ns) for at, prompt in enumerate(prompts)]
