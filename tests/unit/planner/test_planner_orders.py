"""Tests of the planner's orders to workers over scripted channels."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.contracts.errors import StaleRole
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, Assignment, Worker
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.net.access import bearer
from libs.runtime.tasks import TaskOwner
from services.planner import executor
from services.planner.executor import CallOutcome, OrderExecutor
from services.planner.role_planner import Order


class Channel:
    """A channel to one worker that records calls and answers them when and how the test says."""

    def __init__(self) -> None:
        self.requests: list[pb.SetRoleRequest] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None
        self.closed = 0

    def unary_unary(self, method: str, **_: Any) -> Any:
        async def ask(request: Any, **_: Any) -> Any:
            assert method.endswith("SetRole")
            self.requests.append(request)
            await self.may_answer.wait()
            if self.error is not None:
                raise self.error
            assignment = Assignment(
                role=request.role, budget_tokens=request.budget_tokens, epoch=request.expected_epoch + 1
            )
            return pb.SetRoleResponse(assignment=assignment)

        return ask

    async def close(self) -> None:
        self.closed += 1


class Network:
    """Transport over such channels, by address."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self.token_travels = True

    def channel(self, address: str) -> Any:
        return self.channels.setdefault(address, Channel())

    def metadata(self, _address: str) -> Any:
        return bearer("secret") if self.token_travels else ()


class Rig:
    def __init__(self, *, token: str = "secret") -> None:
        self.network, self.tasks = Network(), TaskOwner()
        self.actor = OrderExecutor(self.network, self.tasks, planner_id="planner-0", token=token)  # type: ignore[arg-type]
        self.ended: dict[str, Assignment | None] = {}

    def order(self, *names: str) -> None:
        self.actor.carry_out([order(name) for name in names], self.done)

    def done(self, of: Order, assignment: Assignment | None, failed: bool = False) -> None:
        assert of.worker.id not in self.ended
        self.ended[of.worker.id] = assignment

    def to(self, name: str) -> Channel:
        return self.network.channels[name]

    async def until_ended(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while not self.ended.keys() >= set(names):
                await asyncio.sleep(0)

    async def until_requested(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while not all(name in self.network.channels and self.to(name).requests for name in names):
                await asyncio.sleep(0)


@pytest.fixture
async def rig() -> Any:
    made = Rig()
    yield made
    await made.tasks.close()
    assert made.tasks.error is None
    assert made.actor.outstanding == 0
    assert all(each.closed == len(each.requests) for each in made.network.channels.values())


def order(name: str) -> Order:
    wanted = Assignment(model="sim", role=ROLE_MIXED, budget_tokens=512, epoch=8)
    return Order(Worker(id=name, incarnation=3, address=name), wanted, "prompts press")


def refused(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


async def test_all_orders_of_a_decision_are_sent_before_any_is_answered(rig: Rig) -> None:
    rig.order("a", "b", "c")
    await rig.until_requested("a", "b", "c")
    assert rig.ended == {}
    (request,) = rig.to("a").requests
    assert (request.expected_epoch, request.incarnation, request.role, request.budget_tokens) == (7, 3, ROLE_MIXED, 512)
    assert (request.actor, request.reason, request.wait_ms) == ("planner-0", "prompts press", 0)
    for name in ("c", "a", "b"):
        rig.to(name).may_answer.set()
    await rig.until_ended("a", "b", "c")
    assert {each and each.epoch for each in rig.ended.values()} == {8}
    assert rig.actor.outcomes == {CallOutcome.DONE: 3}


async def test_a_worker_that_has_not_answered_gets_no_second_order(rig: Rig) -> None:
    rig.order("a")
    await rig.until_requested("a")
    again: list[Assignment | None] = []
    rig.actor.carry_out([order("a")], lambda _, assignment, _failed: again.append(assignment))
    assert again == [None]
    rig.to("a").may_answer.set()
    await rig.until_ended("a")
    assert rig.actor.outcomes == {CallOutcome.LEFT: 1, CallOutcome.DONE: 1}
    rig.ended.clear()
    rig.order("a")
    await rig.until_ended("a")
    assert len(rig.to("a").requests) == 2


async def test_orders_beyond_the_bound_on_calls_are_left_to_the_next_decision(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MAX_CALLS", 2)
    rig.order("a", "b", "c")
    assert rig.ended == {"c": None}
    await rig.until_requested("a", "b")
    assert "c" not in rig.network.channels
    for name in ("a", "b"):
        rig.to(name).may_answer.set()
    await rig.until_ended("a", "b")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (
            refused(grpc.StatusCode[StaleRole.grpc_status], "stale_role: expected epoch 7, the worker is at 8"),
            CallOutcome.STALE,
        ),
        (refused(grpc.StatusCode.UNAVAILABLE, "connection refused"), CallOutcome.FAILED),
    ],
    ids=["stale", "away"],
)
async def test_a_refused_or_failed_call_is_counted_and_the_worker_is_left_unchanged(
    rig: Rig, error: Exception, outcome: CallOutcome
) -> None:
    rig.order("a", "b")
    await rig.until_requested("a", "b")
    rig.to("a").error = error
    for name in ("a", "b"):
        rig.to(name).may_answer.set()
    await rig.until_ended("a", "b")
    assert rig.ended["a"] is None and rig.ended["b"] is not None
    assert rig.actor.outcomes == {outcome: 1, CallOutcome.DONE: 1}


async def test_a_call_to_a_worker_that_never_answers_times_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CALL_S", 0.01)
    rig.order("a")
    await rig.until_ended("a")
    assert (rig.ended, rig.actor.outcomes) == ({"a": None}, {CallOutcome.FAILED: 1})


async def test_a_token_is_not_sent_in_plaintext(rig: Rig) -> None:
    rig.network.token_travels = False
    rig.order("a")
    await rig.until_ended("a")
    assert (rig.network.channels, rig.actor.outcomes) == ({}, {CallOutcome.FAILED: 1})


async def test_without_a_token_no_worker_is_called() -> None:
    made = Rig(token="")
    made.order("a")
    await made.until_ended("a")
    assert (made.network.channels, made.actor.outcomes) == ({}, {CallOutcome.FAILED: 1})
    await made.tasks.close()


async def test_the_end_of_the_service_cancels_calls_and_closes_their_channels(rig: Rig) -> None:
    rig.order("a")
    await rig.until_requested("a")
    await rig.tasks.close()
    assert (rig.to("a").closed, rig.actor.outstanding) == (1, 0)
