"""Tests of orders of prompts in a worker, worked out by hand, and of their effect in the lab."""

from dataclasses import replace
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.hardware import resolve
from libs.lab.policies import late_prompts_last, policy_named
from libs.lab.rivals.port import PromptOrder, PromptTurn, QueuedPrompt
from libs.lab.rivals.splits import by_deadline_and_work
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate

pytestmark = pytest.mark.usefixtures("quiet_lab")

MS = 1_000_000
FLOOD = Experiment(
    generate("flipflop:rate=10,seconds=40,period=10,isl=3000,osl=300", seed=2),
    resolve("llama-3.1-70b", "h100"),
    8,
    parse_slo("ttft=max(2s,3x),tpot=50ms"),
)


def queued(came_ms: int, due_ms: int, left_ms: int, *, begun: bool = False) -> QueuedPrompt:
    return QueuedPrompt(came_ms * MS, due_ms * MS, 1000, left_ms * MS, resumed=begun)


def in_order(order: PromptOrder, now_ms: int, *prompts: QueuedPrompt, pace: float | None = None) -> list[int]:
    """Return the arrival times in ms, in order."""
    keys = order(prompts, PromptTurn(now_ms * MS, now_ms * MS, pace))
    ordered = sorted(zip(keys, prompts, strict=True), key=lambda each: each[0])
    return [each.arrival_unix_ns // MS for _, each in ordered]


def test_prompts_that_can_meet_their_deadline_precede_older_ones_that_cannot() -> None:
    # Due at 1,000 after 1,000 ms, 400 ms of work: hopeless from 1,000 - 1.5 x 400 - 0.15 x 1,000 = 250 ms on.
    old, new, begun = queued(0, 1000, 400), queued(100, 1100, 100), queued(200, 1200, 900, begun=True)
    assert in_order(late_prompts_last, 249, new, old) == [0, 100]
    assert in_order(late_prompts_last, 250, new, old, begun) == [200, 100, 0]


def test_at_a_known_pace_the_longest_prompt_makes_room_and_precedes_late_ones() -> None:
    # Those of 100 ms have to start by 1,000 - 150 - 150 = 700 ms after they came; the long one takes 850 / 0.85.
    late, long, short, other = (
        queued(0, 900, 800),
        queued(100, 9100, 850),
        queued(110, 1110, 100),
        queued(120, 1120, 90),
    )
    assert in_order(late_prompts_last, 130, late, long, short, other) == [100, 110, 120, 0]
    assert in_order(late_prompts_last, 130, late, long, short, other, pace=1.0) == [110, 120, 100, 0]
    assert in_order(late_prompts_last, 130, late, long, short, other, pace=2.0) == [100, 110, 120, 0]


def test_deadline_and_work_orders_short_prompts_before_slightly_older_long_ones() -> None:
    # Deadline + work: 1,900 and 1,550 ms.
    long, short = queued(0, 1000, 900), queued(500, 1500, 50)
    assert in_order(by_deadline_and_work, 50, long, short) == [500, 0]
    assert in_order(by_deadline_and_work, 50, queued(0, 1000, 400), short) == [0, 500]
    # At 700 ms one of 400 ms of work is too late for its deadline at 1,000.
    assert in_order(by_deadline_and_work, 700, queued(0, 1000, 400), short) == [500, 0]


def report(name: str, **changes: Any) -> LabReport:
    made, _ = run(replace(FLOOD, **changes), policy_named(name, 8))
    return replace(made, wall_s=0.0, events=0)


def test_in_an_overload_our_order_serves_more_requests_in_a_rivals_workers() -> None:
    plain, ordered = report("static:4:4+guard"), report("static:4:4+guard+order")
    assert ordered.score.completed == plain.score.completed == len(FLOOD.trace.requests)
    assert ordered.score.good > 1.1 * plain.score.good


@pytest.mark.parametrize("name", ["static:4:4+order", "arrow", "niyama"])
def test_a_decision_at_every_step_gives_the_same_result(name: str) -> None:
    assert report(name) == report(name, stepwise=True)


def test_parts_of_our_policy_can_be_left_out_and_those_of_rivals_cannot() -> None:
    assert not policy_named("fulcrum-auto-order", 8).late_last
    assert not policy_named("fulcrum-mixed:3:5-guard", 8).guard
    with pytest.raises(InvalidRequest, match="Fulcrum's own"):
        policy_named("arrow-guard", 8)
