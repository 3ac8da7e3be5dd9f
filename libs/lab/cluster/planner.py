"""The lab's planner: the live decision about roles from the reports of workers and gateway, with live delays."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.watch import held_tokens, load_now
from libs.lab.cluster.worker import LabWorker
from libs.policy.planner.advice import decodes_to_come, workload
from libs.policy.planner.role_planning import Memory, MoveEvidence, PlannedWorker, RoleOrder, RolePlan, assign
from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.roles import Role

PERIOD_NS: Final = 100_000_000
DECISION_DELAY_NS: Final = 100_000_000
"""The delay from a change at a worker until a decision based on it takes effect: telemetry, the decision, the call."""
WINDOW: Final = 10
"""The number of periods over which computed work is averaged."""
OnLook = Callable[[int, Workload, RolePlan], None]
"""Handle a decision, given the time in ns, the observed work, and the plan."""


class LabPlanner:
    """A planner that decides in every period."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        time: VirtualTime,
        waiting_tokens: Callable[[], int],
        tpot_ns: int,
        *,
        held: Callable[[], tuple[int, int]] = lambda: (0, 0),
        later_ns: int = 0,
        on_look: OnLook | None = None,
    ) -> None:
        """- `waiting_tokens`: tokens of the prompts in the gateway that can still be in time.
        - `held`: requests that wait there for a place to decode, and their prompt tokens.
        - `later_ns`: additional age of the observed state.
        - `on_look`: called with each decision.
        """
        self._on_look = on_look
        self._later_ns = later_ns
        self._pending: dict[str, RoleOrder] = {}
        """Orders by worker that its state does not show yet, as the live planner tracks them."""
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
        # What is seen is `later_ns` old: the decision was made so much later than it looks here, and its effect is not.
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
        held, held_prompt_tokens = self._held()
        return workload(
            self._engine,
            served=served,
            waiting_tokens=waiting_tokens + self._waiting_tokens(),
            decodes=decodes,
            kv_tokens=kv_tokens,
            held=held,
            held_prompt_tokens=held_prompt_tokens,
            tpot_ns=self._tpot_ns,
        )
