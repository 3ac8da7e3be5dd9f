"""Conversion of capacity plans to and from protobuf."""

from itertools import repeat
from math import isfinite
from typing import Final

from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import PoolNeed
from libs.policy.capacity import MOST_WORKERS, PHASES, CapacityPlan, Phase, PoolHour

# Six weeks of quarter hours are the most that a plan may have.
MAX_STRETCHES: Final = 4_096


def plan_message(plan: CapacityPlan, model: str, metrics_id: str, made_unix_ns: int) -> PlanMessage:
    """Encode a plan in Unix seconds whose stretches follow each other without a gap."""
    return PlanMessage(
        metrics_id=metrics_id,
        model=model,
        made_unix_ns=made_unix_ns,
        start_unix_s=plan.starts_s[0] if plan.starts_s else 0.0,
        step_s=plan.step_s,
        confidence=plan.confidence,
        spare_workers=plan.spare,
        **{phase: _need(plan, phase) for phase in PHASES},
    )


def _need(plan: CapacityPlan, phase: Phase) -> PoolNeed:
    pool = plan.pools[phase]
    return PoolNeed(
        surely=[each.surely for each in pool],
        p50=[each.p50 for each in pool],
        p95=[each.p95 for each in pool],
        asked=[each.asked for each in pool],
        short=[each.short for each in pool],
        there=plan.there.get(phase),
    )


def plan_of(message: PlanMessage) -> CapacityPlan:
    """Decode a plan; raise ValueError if the message is invalid."""
    count = len(message.prefill.asked)
    if not 0 < count <= MAX_STRETCHES:
        raise ValueError(f"a plan has 1 to {MAX_STRETCHES} stretches, this one {count}")
    if not (isfinite(message.start_unix_s) and isfinite(message.step_s) and message.step_s > 0):
        raise ValueError(f"a plan begins at {message.start_unix_s} s in steps of {message.step_s} s")
    pools: dict[Phase, tuple[PoolHour, ...]] = {}
    there: dict[Phase, int] = {}
    for phase in PHASES:
        need: PoolNeed = getattr(message, phase)
        columns = need.surely, need.p50, need.p95, need.asked, need.short or repeat(0.0, count)
        pools[phase] = tuple(PoolHour(*each) for each in zip(*columns, strict=True))
        if len(pools[phase]) != count or max(max(each.asked, each.p95) for each in pools[phase]) > MOST_WORKERS:
            raise ValueError(f"{phase} has another number of stretches, or more than {MOST_WORKERS} workers")
        if need.HasField("there"):
            there[phase] = need.there
    starts = tuple(message.start_unix_s + at * message.step_s for at in range(count))
    return CapacityPlan(starts, message.step_s, pools, there, message.confidence, message.spare_workers)
