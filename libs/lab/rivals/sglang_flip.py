"""SGLang's change of roles at run time (`POST /pd_role_switch`), decided by thresholds.

sgl-project/sglang pull request 28403 (merged, June 2026), whose description was read: a flip keeps weights and the
KV pool, rebuilds the structures of its role, and needs the instance idle, so it drains first. Who decides is left to
the operator. The thresholds here are this project's: one flip at a time towards the phase that is over its limit,
if the other one has room.
"""

from dataclasses import dataclass
from typing import Final

from libs.lab.rivals.llm_d import kv_use
from libs.lab.rivals.pools import decode_pool, emptiest, from_split, prefill_pool, sequences
from libs.lab.rivals.port import Move, MoveCost, Rival, SeenCluster, SeenWorker
from libs.lab.rivals.splits import SplitRouter
from libs.policy.roles import Role

LOOK_NS: Final = 1_000_000_000
PREFILL_HIGH, PREFILL_LOW = 0.5, 0.25
"""Mean backlogs as shares of the TTFT target from which prefill needs a worker, and up to which it can spare one."""
DECODE_HIGH, DECODE_LOW = 0.9, 0.6
"""Decode steps as shares of the TPOT target, or shares of KV in use, with the same meaning for decode."""
REBUILD_NS: Final = 1_000_000_000
"""The time to rebuild the structures of a role once idle; the pull request gives none."""


@dataclass(frozen=True, slots=True)
class ThresholdMover:
    """A mover of one worker at a time."""

    every_ns: int = LOOK_NS
    wants_steps: bool = False

    def moves(self, seen: SeenCluster) -> list[Move]:
        """Return at most one flip, and none while another worker drains or rebuilds."""
        prefills, decoders = prefill_pool(seen.workers), decode_pool(seen.workers)
        if not prefills or not decoders or not all(each.ready for each in seen.workers):
            return []
        backlog = sum(each.backlog_ns for each in prefills) / len(prefills) / seen.slo.ttft_ns
        load = sum(decode_load(each, seen.slo.tpot_ns) for each in decoders)
        after = load / (len(decoders) - 1) if len(decoders) > 1 else 1.0
        if backlog > PREFILL_HIGH and after < DECODE_HIGH:
            return [Move(emptiest(decoders).index, Role.PREFILL, 0, "prefill over its limit")]
        if load / len(decoders) > DECODE_HIGH and backlog < PREFILL_LOW and len(prefills) > 1:
            flips = min(prefills, key=lambda each: (each.backlog_ns, each.index))
            return [Move(flips.index, Role.MIXED, 0, "decode over its limit")]
        return []


def decode_load(worker: SeenWorker, tpot_ns: int) -> float:
    """Return a decode worker's utilisation relative to its limit, by TPOT, memory or slots."""
    return max(worker.decode_step_ns / tpot_ns, kv_use(worker), sequences(worker) / worker.max_sequences)


def sglang_flip(prefill: int = 0, decode: int = 0) -> Rival:
    """Return SGLang with flips by threshold, starting from this split or an even one."""
    return Rival(
        name=f"sglang-flip:{prefill}:{decode}" if prefill or decode else "sglang-flip",
        source="sgl-project/sglang pull request 28403: its description; the thresholds are this project's",
        simplified=(
            "The thresholds and their interval are not SGLang's, which leaves the decision to the operator.",
            f"Rebuilding a role takes {REBUILD_NS / 1e9:g} s once the instance is idle, an assumption.",
            "Its router predicts with the step-time model, which is more than such systems know.",
        ),
        first_roles=from_split(prefill, decode),
        router=lambda _: SplitRouter(),
        mover=lambda _: ThresholdMover(),
        move_cost=MoveCost(drains=True, start_ns=REBUILD_NS),
    )
