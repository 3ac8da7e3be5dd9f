"""What the planner knows: workers from the registry, their time from telemetry, and its last decisions."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_UNSPECIFIED, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_ROLE_MOVED,
    ACTION_SET_MODE,
    Action,
    Alternative,
    ClusterSummary,
    Decision,
    Mode,
    PoolSummary,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_name
from libs.policy.planner.moves import MoveLimits, MovePlan, decide
from libs.policy.planner.snapshot import ClusterSnapshot
from libs.telemetry.fleet import Fleet
from libs.telemetry.timeline import PrefillShares
from services.planner.mode import mode_word
from services.planner.observe import ObservedWorker, observe_cluster, observe_worker

STALE_NS: Final = 3_000_000_000
"""Without news for this long, a source is taken to be away; what it said last stays in use."""
MAX_UINT32: Final = 2**32 - 1
MAX_UINT64: Final = 2**64 - 1
"""What a decision can carry: sums over workers that each tell the most are cut there."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who decides, and how far its decisions go."""

    planner_id: str
    incarnation: int
    mode: Mode


class PlannerState:
    """Entered from the registry and the bus; time comes in as an argument."""

    def __init__(
        self,
        identity: Identity,
        limits: MoveLimits,
        prefill_shares: PrefillShares,
        *,
        lag_ns: int,
        window_ns: int,
        kept_decisions: int,
    ) -> None:
        self.identity = identity
        self.fleet = Fleet(prefill_shares)
        self.workers: Sequence[Worker] = ()
        self.decisions: deque[Decision] = deque(maxlen=kept_decisions)
        self.told: Counter[Action] = Counter()
        """Decisions so far, by what they say was done."""
        self.started_ns = identity.incarnation
        self._limits = limits
        self._lag_ns = lag_ns
        self._window_ns = window_ns
        self._registry_ns: int | None = None
        self.at_rest = False
        """Whether the last decision was about a cluster in which nothing happened, and nothing has since."""

    def take_workers(self, workers: Sequence[Worker], now_ns: int) -> list[Decision]:
        """The registry's list, as it came at `now_ns`; the role moves that it shows, kept like decisions.

        A worker that is seen for the first time has not moved; of several moves between two lists the last one shows.
        """
        known = {(worker.id, worker.incarnation): worker.assignment.epoch for worker in self.workers}
        self.at_rest = self.at_rest and list(workers) == list(self.workers)
        self.workers = workers
        self._registry_ns = now_ns
        return [
            self._tell(_role_moved(worker), now_ns)
            for worker in workers
            if worker.assignment.epoch > known.get((worker.id, worker.incarnation), worker.assignment.epoch)
        ]

    def take_batch(self, batch: StepBatch, now_ns: int) -> None:
        """Telemetry of a worker that came at `now_ns`."""
        self.fleet.add(batch, now_ns)
        load = batch.load
        self.at_rest = self.at_rest and not (
            batch.steps.start_unix_ns or load.running or load.waiting or load.awaiting_kv
        )

    def set_mode(self, mode: Mode, actor: str, now_ns: int) -> Decision:
        """Decide from now on in this mode, or not at all; the change is kept like a decision."""
        self.identity = replace(self.identity, mode=mode)
        self.at_rest = False
        word = mode_word(mode)
        return self._tell(Decision(action=ACTION_SET_MODE, actor=actor, reason=f"{actor} set the mode: {word}"), now_ns)

    def registry_age_ns(self, now_ns: int) -> int:
        """Since the registry answered; since the start when it never has."""
        return now_ns - (self.started_ns if self._registry_ns is None else self._registry_ns)

    def observed(self, now_ns: int) -> list[ObservedWorker]:
        """Each registered worker with its telemetry."""
        return [observe_worker(worker, self.fleet, now_ns - self._lag_ns, self._window_ns) for worker in self.workers]

    def snapshot(self, now_ns: int) -> ClusterSnapshot:
        """The cluster over the last window."""
        return observe_cluster(self.workers, self.fleet, now_ns - self._lag_ns, self._window_ns)

    def decide(self, now_ns: int) -> Decision:
        """Decide, and keep the decision."""
        snapshot = self.snapshot(now_ns)
        self.at_rest = snapshot.at_rest
        return self._tell(decision_message(snapshot, decide(snapshot, self._limits)), now_ns)

    def _tell(self, decision: Decision, now_ns: int) -> Decision:
        """Sign a decision and keep it."""
        self.told[decision.action] += 1
        decision.planner_id = self.identity.planner_id
        decision.incarnation = self.identity.incarnation
        decision.mode = self.identity.mode
        decision.sequence = sum(self.told.values())
        decision.decided_unix_ns = now_ns
        self.decisions.append(decision)
        return decision

    def not_live(self, now_ns: int) -> str | None:
        """What the planner does not hear of, in words; None when all is well."""
        reasons = []
        age_ns = self.registry_age_ns(now_ns)
        if self._registry_ns is None:
            reasons.append("the registry has not answered yet")
        elif age_ns > STALE_NS:
            reasons.append(f"the registry has been silent for {age_ns / 1e9:.1f} s: workers are those last known")
        heard_ns = self.fleet.latest_arrival_ns or self.started_ns
        if self.workers and now_ns - heard_ns > STALE_NS:
            reasons.append(f"no telemetry has come for {(now_ns - heard_ns) / 1e9:.1f} s: the broker may be away")
        return "; ".join(reasons) or None


def _role_moved(worker: Worker) -> Decision:
    change, role = worker.role_change, role_name(worker.assignment)
    actor = change.actor or "somebody"
    return Decision(
        action=ACTION_ROLE_MOVED,
        reason=f"{actor} moved {worker.id} to {role}: {change.reason or 'no reason given'}",
        actor=actor,
        worker_id=worker.id,
        worker_incarnation=worker.incarnation,
        assignment=worker.assignment,
    )


def decision_message(snapshot: ClusterSnapshot, plan: MovePlan) -> Decision:
    """What was decided from what, before it is signed."""
    return Decision(
        action=f"ACTION_{plan.action.name}",
        reason=plan.reason,
        inputs=ClusterSummary(
            coverage=snapshot.coverage,
            window_ms=snapshot.window_ms,
            pools=[
                PoolSummary(
                    model=pool.model,
                    role=ROLE_UNSPECIFIED if pool.role is None else f"ROLE_{pool.role.name}",
                    workers=len(pool.workers),
                    gpus=min(pool.gpus, MAX_UINT32),
                    busy=pool.busy,
                    running=min(pool.running, MAX_UINT32),
                    waiting=min(pool.waiting, MAX_UINT32),
                    waiting_prefill_tokens=min(pool.waiting_prefill_tokens, MAX_UINT64),
                )
                for pool in snapshot.pools
            ],
        ),
        alternatives=[Alternative(name=each.name, score=each.score) for each in plan.alternatives],
    )


def action_word(action: Action) -> str:
    """keep, set_role, or unknown."""
    return Action.Name(action).removeprefix("ACTION_").lower() if action in Action.values() else "unknown"
