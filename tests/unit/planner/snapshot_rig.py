"""Workers and telemetry as a planner receives them."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_READY,
    Assignment,
    Worker,
)
from libs.contracts.roles import role_from_name
from libs.testing.workers.telemetry import step, step_batch

WINDOW_MS = 1000


def worker(worker_id, role, *, gpus=1, model="sim", state=WORKER_STATE_READY, incarnation=1):
    wire_role, budget_tokens = role_from_name(role, 64 if role == "mixed" else 0)
    return Worker(
        id=worker_id,
        incarnation=incarnation,
        node="node-a",
        pid=42,
        address="127.0.0.1:1",
        engine="sim",
        device="sim:h100",
        gpus=gpus,
        state=state,
        assignment=Assignment(model=model, role=wire_role, budget_tokens=budget_tokens, epoch=3),
    )


def busy_batch(registered, busy_ms, *, load=None, incarnation=1, cover_ms=(0, WINDOW_MS)):
    """A batch of a registered worker that was busy for `busy_ms` of the window."""
    steps = [step(0, busy_ms, decode=1)] if busy_ms else []
    return step_batch(
        1, cover_ms, steps, worker=registered.id, gpus=registered.gpus, load=load, incarnation=incarnation
    )
