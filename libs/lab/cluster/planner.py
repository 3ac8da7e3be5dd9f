"""The lab's planner: the live decision about roles with live delays, or a rival's on Fulcrum's gateway.

With a rival's decision, the lab measures its policy apart from its mechanism. Prompts that wait in Fulcrum's gateway
would wait at workers in the rival's own system, so its mover sees an even share of them at each prefill worker.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.watch import Watch, held_tokens, load_now
from libs.lab.cluster.worker import LabWorker
from libs.lab.rivals.port import RivalMover, SeenCluster, SeenWorker, Slo
from libs.policy.planner.advice import decodes_to_come, workload
from libs.policy.planner.due import due_within_ns, strict_target_ns
from libs.policy.planner.role_planning import Memory, MoveEvidence, PlannedWorker, RoleOrder, RolePlan, assign
from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.roles import Role

PERIOD_NS: Final = 100_000_000
DECISION_DELAY_NS: Final = 100_000_000
"""The delay from a change at a worker until a decision based on it takes effect: telemetry, the decision, the call."""
WINDOW: Final = 10
"""The number of periods over which computed work is averaged."""
MOST_TARGETS: Final = 256
"""The number of requests whose TTFT targets are kept."""
OnLook = Callable[[int, Workload, RolePlan], None]
"""A function that handles a decision, given the time in ns, the observed work, and the plan."""


class LabPlanner:
    """A planner that decides once per period."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        time: VirtualTime,
        waiting_tokens: Callable[[], int],
        tpot_ns: int,
        *,
        held: Callable[[], tuple[int, int, float]] = lambda: (0, 0, 0.0),
        later_ns: int = 0,
        on_look: OnLook | None = None,
    ) -> None:
        """- `waiting_tokens`: tokens of the prompts in the gateway that can still be in time.
        - `held`: requests that wait there for a place to decode, their prompt tokens, and the mean length of all
          prompts that wait there, 0 without any.
        - `later_ns`: additional age of the observed state.
        - `on_look`: called with each decision.
        """
        self._on_look = on_look
        self._later_ns = later_ns
        self._pending: dict[str, RoleOrder] = {}
        """Orders by worker that its state does not show yet, tracked as by the live planner."""
        self._evidence = MoveEvidence().aged(later_ns)
        shape = workers[0].shape
        self._workers = workers
        self._time = time
        self._waiting_tokens = waiting_tokens
        self._held = held
        self._tpot_ns = tpot_ns
        self._engine = WorkerProfile(
            shape.step_time, shape.chunk_tokens, shape.max_sequences, shape.kv_blocks * shape.block_tokens
        )
        self._memory = Memory()
        self._computed_ns: deque[float] = deque(maxlen=WINDOW)
        self._ttft_ns: deque[int] = deque(maxlen=MOST_TARGETS)
        """The TTFT targets of the last requests."""

    def arrived(self, ttft_ns: int) -> None:
        """Record the TTFT target of a request."""
        self._ttft_ns.append(ttft_ns)

    def start(self) -> None:
        for worker in self._workers:
            worker.keep_recent_steps()
        self._look()

    def _look(self) -> None:
        work = self._work()
        now_ns = self._time.now_ns()
        assigned = assign(self._engine, work, self._standing(), self._memory, now_ns, evidence=self._evidence)
        self._memory = assigned.memory
        if self._on_look is not None:
            self._on_look(now_ns, work, assigned)
        if assigned.changes:
            self._pending |= {change.worker_id: change for change in assigned.changes}
            delay_ps = (DECISION_DELAY_NS + self._later_ns) * PS_PER_NS
            self._time.at_ps(self._time.now_ps + delay_ps, lambda: self._apply(assigned))
        self._time.at_ps(self._time.now_ps + PERIOD_NS * PS_PER_NS, self._look)

    def _apply(self, assigned: RolePlan) -> None:
        by_id = {worker.id: worker for worker in self._workers}
        for change in assigned.changes:
            if self._pending.get(change.worker_id) is change:
                del self._pending[change.worker_id]
            if not by_id[change.worker_id].down:
                by_id[change.worker_id].set_role(change.role, change.budget_tokens)
        # Observations are `later_ns` old. The decision was made that much later than it appears, but its effect was
        # not.
        self._evidence = self._evidence.measured(DECISION_DELAY_NS)

    def _standing(self) -> list[PlannedWorker]:
        found = []
        for worker in self._workers:
            load, assignment = load_now(worker, self._time), self._pending.get(worker.id, worker.assignment)
            found.append(
                PlannedWorker(
                    worker.id,
                    assignment.role,
                    assignment.budget_tokens,
                    worker.ready,
                    load.waiting_prefill_tokens,
                    held_tokens(worker, load),
                )
            )
        return found

    def _work(self) -> Workload:
        model, decodes, kv_tokens, waiting_tokens, computed_ns = self._engine.step_time, 0, 0, 0, 0.0
        for worker in self._workers:
            load = load_now(worker, self._time)
            for work, _ in worker.take_recent_steps():
                computed_ns += model.prefill_ns(work)
            waiting_tokens += load.waiting_prefill_tokens
            queued, queued_tokens = worker.core.queued_decodes()
            if self._pending.get(worker.id, worker.assignment).role is Role.MIXED:
                decodes += load.running + load.awaiting_kv + queued
                kv_tokens += held_tokens(worker, load) + queued_tokens
            else:
                count, tokens = decodes_to_come(load.running, load.waiting, load.waiting_prefill_tokens)
                decodes += count
                kv_tokens += round(tokens)
        self._computed_ns.append(computed_ns)
        served = sum(self._computed_ns) / (len(self._computed_ns) * PERIOD_NS)
        held, held_prompt_tokens, prompt_tokens = self._held()
        return workload(
            self._engine,
            served=served,
            waiting_tokens=waiting_tokens + self._waiting_tokens(),
            decodes=decodes,
            kv_tokens=kv_tokens,
            held=held,
            held_prompt_tokens=held_prompt_tokens,
            tpot_ns=self._tpot_ns,
            prompt_tokens=prompt_tokens,
            due_ns=due_within_ns(strict_target_ns(self._ttft_ns)),
        )


# Cached prefixes matter only to a rival's router, and here Fulcrum's gateway binds.
NO_KEYS: Final[list[bytes]] = []


class BorrowedMover:
    """A driver that consults the rival's mover at the rival's interval and carries out its moves as role changes."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        time: VirtualTime,
        mover: RivalMover,
        slo: Slo,
        waiting: Callable[[], tuple[int, int]],
    ) -> None:
        """Create the driver. `waiting` returns (prompts, their tokens) in the gateway; `slo` is that of a typical
        request.
        """
        self._workers = workers
        self._time = time
        self._mover = mover
        self._waiting = waiting
        self._watch = Watch(workers, time, slo, keep_steps=mover.wants_steps)

    def start(self) -> None:
        self._time.at_ps(self._time.now_ps + self._mover.every_ns * PS_PER_NS, self._look)

    def arrived(self, answer: LabAnswer) -> None:
        self._watch.arrived(answer, NO_KEYS)

    def ended(self, answer: LabAnswer) -> None:
        self._watch.ended(answer)

    def _look(self) -> None:
        seen = self._watch.seen()
        for move in self._mover.moves(replace(seen, workers=self._with_waiting(seen))):
            if not self._workers[move.index].down:
                self._workers[move.index].set_role(move.role, move.budget_tokens)
        self._time.at_ps(self._time.now_ps + self._mover.every_ns * PS_PER_NS, self._look)

    def _with_waiting(self, seen: SeenCluster) -> list[SeenWorker]:
        takers = [worker for worker in seen.workers if worker.ready and _computes_prompts(worker)]
        prompts, tokens = self._waiting()
        if not takers or not prompts:
            return list(seen.workers)
        share, share_tokens = max(prompts // len(takers), 1), tokens // len(takers)
        squares = share_tokens**2 // share
        indexes = {worker.index for worker in takers}
        return [
            replace(
                worker,
                prompts=worker.prompts + share,
                prompt_tokens=worker.prompt_tokens + share_tokens,
                backlog_ns=worker.backlog_ns + worker.speed.prompt_ns(share_tokens, squares),
            )
            if worker.index in indexes
            else worker
            for worker in seen.workers
        ]


def _computes_prompts(worker: SeenWorker) -> bool:
    return worker.role is Role.PREFILL or worker.budget_tokens > 0
