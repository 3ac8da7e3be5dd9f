"""A cluster whose workers report their load of prompts, and a planner's state that receives the reports."""

from typing import Any

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_READY,
    Assignment,
    Capabilities,
    Load,
    RoleChange,
    Worker,
)
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import MODE_AUTO
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue, StepBatch
from libs.contracts.roles import role_from_name, role_name
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.profiles import PROFILES
from libs.perfmodel.wire import step_time_message
from libs.testing.workers.telemetry import MS, Telling, at, step, step_batch
from services.planner.state import Decided, Identity, PlannerState

STEP_TIME = step_time_message(FittedModel(PROFILES["llama-8b-h100"].step_time))
WINDOW_MS = 1_000
CHUNK = 512


class Cluster:
    """Registered workers that report their load of prompts."""

    def __init__(self, mode: Any = MODE_AUTO, **roles: str) -> None:
        self.state = PlannerState(
            Identity("planner-0", at(0), mode), lag_ns=0, window_ns=WINDOW_MS * MS,
            kept_decisions=100,
        )  # fmt: skip
        self.workers = {name: registered(name, role) for name, role in roles.items()}
        self.ms = 0
        self.telling = Telling()
        self.register()

    def register(self) -> None:
        """Return the registry's present list."""
        self.state.take_workers(
            [Worker.FromString(each.SerializeToString()) for each in self.workers.values()], at(self.ms)
        )

    def hear(self, batch: StepBatch, now_ms: int) -> None:
        """Receive a worker's report, by way of a metrics service."""
        self.state.take_loads(self.telling.loads([batch], at(now_ms)), at(now_ms))

    def decide(self, load: Load | None = None, **busy: float) -> Decided:
        """Decide after another window with these shares of workers' time spent on prompts."""
        from_ms, self.ms = self.ms, self.ms + WINDOW_MS
        self.register()
        batches = []
        for name, each in self.workers.items():
            share = busy.get(name, 0.0)
            steps = [step(from_ms, from_ms + share * WINDOW_MS, prefill=CHUNK)] if share else []
            batch = step_batch(
                self.ms, (from_ms, self.ms), steps, worker=name, load=load or Load(free_kv_blocks=1_000), role="decode"
            )
            batch.assignment.CopyFrom(each.assignment)
            batch.step_time.CopyFrom(STEP_TIME)
            batches.append(batch)
        self.state.take_loads(self.telling.loads(batches, at(self.ms)), at(self.ms))
        return self.state.decide(at(self.ms))

    def queue(self, prompt_tokens: int) -> None:
        """Report that much waiting at a gateway."""
        queues = [ModelQueue(model="sim", prefill_requests=1, prefill_tokens=prompt_tokens)] if prompt_tokens else []
        reported = GatewayQueues(gateway_id="g", incarnation=1, told_unix_ns=at(self.ms), queues=queues)
        self.state.take_queues(reported, at(self.ms + WINDOW_MS))

    def carry_out(self, decided: Decided) -> None:
        """Carry out orders as workers that answer and update the registry."""
        for order in decided.orders:
            self.workers[order.worker.id].assignment.CopyFrom(order.wanted)
            changed = RoleChange(actor="planner-0", unix_ns=at(self.ms), own_budget_tokens=order.own_budget_tokens)
            self.workers[order.worker.id].role_change.CopyFrom(changed)
            self.state.done(order, order.wanted, at(self.ms))
        self.register()


def registered(name: str, role: str) -> Worker:
    wire_role, budget_tokens = role_from_name(role, CHUNK if role == "mixed" else 0)
    return Worker(
        id=name, incarnation=1, state=WORKER_STATE_READY, address="127.0.0.1:1",
        assignment=Assignment(model="sim", role=wire_role, budget_tokens=budget_tokens, epoch=3),
        capabilities=Capabilities(block_size_tokens=16, kv_blocks=1_000, max_sequences=64, chunk_tokens=CHUNK),
    )  # fmt: skip


def actions(decided: Decided) -> list[tuple[int, str, str]]:
    """Return the actions by worker; decisions without changes have none."""
    return [
        (each.action, change.worker_id, role_name(change.assignment))
        for each in decided.decisions
        for change in each.changes
    ]
