"""What a planner decides about workers, tells and remembers: from telemetry to decisions and orders."""

from typing import Any

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Assignment, Capabilities, Load, Worker
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import (
    ACTION_KEEP,
    ACTION_SET_BUDGET,
    ACTION_SET_ROLE,
    MODE_ADVISORY,
    MODE_AUTO,
)
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue
from libs.contracts.roles import role_from_name, role_name
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.profiles import PROFILES
from libs.perfmodel.wire import step_time_message
from libs.policy.planner.assigning import CALM_NS
from libs.policy.planner.moves import KEEP, MoveLimits
from libs.telemetry.split import prefill_shares
from libs.testing.telemetry import MS, at, step, step_batch
from services.planner.state import Decided, Identity, PlannerState

STEP_TIME = step_time_message(FittedModel(PROFILES["llama-8b-h100"].step_time))
WINDOW_MS = 1_000
CHUNK = 512


class Cluster:
    """Workers that are registered and say how busy they are with prompts."""

    def __init__(self, mode: Any = MODE_AUTO, **roles: str) -> None:
        self.state = PlannerState(
            Identity("planner-0", at(0), mode), MoveLimits(), prefill_shares, lag_ns=0, window_ns=WINDOW_MS * MS,
            kept_decisions=100,
        )  # fmt: skip
        self.workers = {name: registered(name, role) for name, role in roles.items()}
        self.ms = 0
        self.state.take_workers(list(self.workers.values()), at(0))

    def decide(self, **busy: float) -> Decided:
        """After another window in which workers spent such shares of it on prompts."""
        from_ms, self.ms = self.ms, self.ms + WINDOW_MS
        for name, each in self.workers.items():
            share = busy.get(name, 0.0)
            steps = [step(from_ms, from_ms + share * WINDOW_MS, prefill=CHUNK)] if share else []
            batch = step_batch(
                self.ms, (from_ms, self.ms), steps, worker=name, load=Load(free_kv_blocks=1_000), role="decode"
            )
            batch.assignment.CopyFrom(each.assignment)
            batch.step_time.CopyFrom(STEP_TIME)
            self.state.take_batch(batch, at(self.ms))
        return self.state.decide(at(self.ms))

    def queue(self, prompt_tokens: int) -> None:
        """So much waits at a gateway."""
        queues = [ModelQueue(model="sim", prefill_requests=1, prefill_tokens=prompt_tokens)] if prompt_tokens else []
        told = GatewayQueues(gateway_id="g", incarnation=1, told_unix_ns=at(self.ms), queues=queues)
        self.state.take_queues(told, at(self.ms + WINDOW_MS))

    def carry_out(self, decided: Decided) -> None:
        """As workers do that answer, and tell the registry."""
        for order in decided.orders:
            self.workers[order.worker.id].assignment.CopyFrom(order.wanted)
            self.state.done(order, order.wanted)
        self.state.take_workers(list(self.workers.values()), at(self.ms))


def registered(name: str, role: str) -> Worker:
    wire_role, budget_tokens = role_from_name(role, CHUNK if role == "mixed" else 0)
    return Worker(
        id=name, incarnation=1, state=WORKER_STATE_READY, address="127.0.0.1:1",
        assignment=Assignment(model="sim", role=wire_role, budget_tokens=budget_tokens, epoch=3),
        capabilities=Capabilities(block_size_tokens=16, kv_blocks=1_000, max_sequences=64, chunk_tokens=CHUNK),
    )  # fmt: skip


def actions(decided: Decided) -> list[tuple[int, str, str]]:
    return [(each.action, each.worker_id, role_name(each.assignment)) for each in decided.decisions]


def test_decode_workers_take_prompts_when_these_press_on_prefill_workers() -> None:
    cluster = Cluster(p="prefill", d="decode", e="decode")
    assert actions(cluster.decide(p=0.4)) == [(ACTION_KEEP, "", "standby")]
    decided = cluster.decide(p=0.6)
    assert actions(decided) == [(ACTION_SET_BUDGET, "d", "mixed"), (ACTION_SET_BUDGET, "e", "mixed")]
    told = decided.decisions[0]
    assert told.reason == (
        "prompts press 0.6 on 1 prefill worker; 2 decode workers that take up to 512 prompt tokens a step leave 0.2"
    )
    assert (told.worker_incarnation, told.assignment.epoch, told.assignment.budget_tokens) == (1, 4, CHUNK)
    assert [each.name for each in told.alternatives] == ["1 prefill, 2 decode", "2 prefill, 1 decode"]
    assert [pool.workers for pool in told.inputs.pools] == [1, 2]
    assert [(each.worker.id, each.wanted, each.reason) for each in decided.orders] == [
        (each.worker_id, each.assignment, each.reason) for each in decided.decisions
    ]


def test_a_worker_that_was_asked_is_not_asked_again_until_the_call_has_failed() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (order,) = cluster.decide(p=0.9).orders
    assert cluster.decide(p=0.9).orders == ()
    cluster.state.done(order, None)
    (again,) = cluster.decide(p=0.9).orders
    assert again.wanted == order.wanted
    cluster.state.done(again, again.wanted)
    assert cluster.decide(p=0.9).orders == ()  # the registry and telemetry do not tell of it yet
    cluster.workers["d"].assignment.CopyFrom(again.wanted)
    assert cluster.decide(p=0.9).orders == ()


def test_what_somebody_else_has_set_meanwhile_holds_and_the_next_call_is_made_for_that() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (order,) = cluster.decide(p=0.9).orders
    cluster.workers["d"].assignment.epoch = 7
    cluster.state.done(order, None)
    (again,) = cluster.decide(p=0.9).orders
    assert again.wanted.epoch == 8


def test_prompts_leave_decode_workers_once_they_have_not_pressed_for_a_while() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.carry_out(cluster.decide(p=0.9))
    for _ in range(CALM_NS // MS // WINDOW_MS):
        assert cluster.decide().orders == ()
    decided = cluster.decide()
    assert actions(decided) == [(ACTION_SET_BUDGET, "d", "decode")]
    assert "prompts have pressed less than 0.2 on 1 prefill worker for 5 s" in decided.decisions[0].reason


def test_a_prefill_worker_becomes_a_decode_worker_where_sequences_fill_those_there_are() -> None:
    cluster = Cluster(p="prefill", d="prefill", e="mixed")
    load = Load(running=64, free_kv_blocks=0)
    cluster.decide()
    batch = step_batch(10_000, (cluster.ms, cluster.ms + 1), worker="e", load=load)
    batch.assignment.CopyFrom(cluster.workers["e"].assignment)
    batch.step_time.CopyFrom(STEP_TIME)
    cluster.state.take_batch(batch, at(cluster.ms + 1))
    decided = cluster.state.decide(at(cluster.ms + 1))
    assert actions(decided) == [(ACTION_SET_ROLE, "p", "mixed")]
    assert decided.decisions[0].reason.startswith("decodes press 1.1 on 1 decode worker; 1 prefill to decode leaves 0.")
    (order,) = decided.orders
    cluster.state.done(order, None)
    again = cluster.state.decide(at(cluster.ms + 2))
    assert actions(again) == actions(decided), "a call that failed leaves the worker to the next decision"


def test_in_advisory_mode_the_same_is_told_and_nothing_is_asked_for() -> None:
    cluster = Cluster(MODE_ADVISORY, p="prefill", d="decode")
    for _ in range(2):
        decided = cluster.decide(p=0.9)
        assert decided.orders == ()
        (kept,) = decided.decisions
        assert kept.action == ACTION_KEEP
        assert "In mode auto, sim: prompts press 0.9 on 1 prefill worker; 1 decode worker that takes" in kept.reason
        assert [each.name for each in kept.alternatives] == [KEEP, "sim: 1 prefill, 1 decode"]


def test_what_waits_at_gateways_raises_budgets_before_any_prompt_is_computed() -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.queue(100_000)
    assert [each[0] for each in actions(cluster.decide())] == [ACTION_SET_BUDGET]


@pytest.mark.parametrize(("tokens", "rests"), [(0, True), (9, False)])
def test_what_waits_at_a_gateway_ends_the_rest_of_a_cluster(tokens: int, rests: bool) -> None:
    cluster = Cluster(p="prefill", d="decode")
    cluster.decide()
    assert cluster.state.at_rest
    cluster.queue(tokens)
    assert cluster.state.at_rest is rests


def test_a_model_of_which_too_little_is_known_stays_and_that_is_told() -> None:
    cluster = Cluster(p="prefill", d="decode")
    (kept,) = cluster.state.decide(at(WINDOW_MS)).decisions
    assert "Roles of sim stay: 0 of 2 workers are heard" in kept.reason
