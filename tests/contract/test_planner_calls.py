"""Tests of the planner's calls against workers that serve in this process."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, Assignment
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import SystemTransport
from libs.testing.workers.hosts import TOKEN, LocalWorker, eventually, local_worker
from services.planner.executor import CallOutcome, OrderExecutor
from services.planner.role_planner import Order


async def test_workers_apply_decisions_and_a_stale_call_changes_nothing() -> None:
    tasks = TaskOwner()
    settings = CommonSettings.model_validate({"token": TOKEN})
    actor = OrderExecutor(SystemTransport(settings), tasks, planner_id="planner-0", token=TOKEN)
    ended: dict[str, Assignment | None] = {}

    def order(worker: LocalWorker, epoch: int) -> Order:
        wanted = Assignment(model="sim", role=ROLE_MIXED, budget_tokens=512, epoch=epoch)
        return Order(worker.host.worker(), wanted, "prompts press", own_budget_tokens=64)

    async with local_worker("a", "decode") as one, local_worker("b", "decode") as other:
        actor.carry_out([order(one, 2), order(other, 5)], lambda of, got, _failed: ended.update({of.worker.id: got}))
        assert not ended  # no planner waits for them
        await eventually(lambda: len(ended) == 2)
        assert one.host.assignment.current.budget_tokens == 512
        assert one.host.worker().role_change.actor == "planner-0"
        assert one.host.worker().role_change.own_budget_tokens == 64  # for a planner that comes after this one
        assert other.host.assignment.current.budget_tokens == 0
        assert ended["a"] == one.host.worker().assignment
        assert ended["b"] is None
        assert actor.outcomes == {CallOutcome.DONE: 1, CallOutcome.STALE: 1}
    await tasks.close()
