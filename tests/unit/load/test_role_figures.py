"""Tests of how the bench of role moves judges its figures, and of its rivals."""

import asyncio
import json
from typing import Any

import pytest

from libs.contracts.errors import StaleRole
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Worker
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import DescribeResponse
from libs.testing.suites.role_moves import RoleChanger
from libs.worker.admin_client import RoleMove
from load.planner.bench_role import aim_met, faults, spread_ms, table

GOOD: dict[str, Any] = {
    "engine": "sim",
    "slots_used": 0.79,
    "moves": 200,
    "caught_running": 100,
    "moves_with_gateways_behind": 0,
    "rival_rounds": 20,
    "both_won": 0,
    "none_won": 0,
    "sequences_moved": 90,
    "answers": 500,
    "failed": 0,
    "wrong": 0,
    "effect_idle_ms": spread_ms([0.004] * 10),
    "effect_loaded_ms": spread_ms([0.02] * 10),
    "effect_loaded_without_core_waits_ms": spread_ms([0.01] * 10),
    "first_step_ms": spread_ms([]),
}


class OneWorker:
    """The admin service of a worker that takes a role by its epoch, or whichever comes."""

    def __init__(self, *, compares: bool) -> None:
        self._worker = Worker(id="a", assignment=Assignment(epoch=5))
        self._compares = compares

    async def describe(self) -> DescribeResponse:
        seen = DescribeResponse()
        seen.worker.CopyFrom(self._worker)
        return seen

    async def set_role(self, _role: int, _budget: int, *, expected_epoch: int, **_: Any) -> RoleMove:
        await asyncio.sleep(0)
        if self._compares and expected_epoch != self._worker.assignment.epoch:
            raise StaleRole("another was sooner")
        self._worker.assignment.epoch += 1
        return RoleMove(Assignment(epoch=self._worker.assignment.epoch), 0.01, 0.01, 0, 1)


def test_good_figures_have_no_fault() -> None:
    assert faults(GOOD) == []
    assert faults(GOOD | {"moves": 50, "caught_running": 25}) == []


@pytest.mark.parametrize(
    ("worse", "says"),
    [
        ({"failed": 1}, "failed"),
        ({"wrong": 2}, "2 requests were answered differently"),
        ({"caught_running": 99}, "only 99 of 200 moves caught"),
        ({"moves": 50, "caught_running": 24}, "only 24 of 50"),
        ({"moves_with_gateways_behind": 1}, "behind"),
        ({"slots_used": 0.69}, "69% of the decode slots"),
        ({"both_won": 1}, "both rivals won 1 of 20"),
        ({"none_won": 1}, "no rival won 1 of 20"),
    ],
)
def test_each_broken_promise_is_named(worse: dict[str, Any], says: str) -> None:
    (fault,) = faults(GOOD | worse)
    assert says in fault


def test_a_move_that_a_gateway_never_learned_of_is_null_and_misses_the_aim() -> None:
    endless = spread_ms([0.01, None])
    assert endless == {"p50": 10.0, "p99": 10.0, "max": None}
    assert json.loads(json.dumps(endless, allow_nan=False))["max"] is None
    assert aim_met(spread_ms([0.0999])) and not aim_met(spread_ms([0.1]))
    assert not aim_met(spread_ms([None])) and not aim_met(spread_ms([]))
    reported = table([GOOD | {"effect_loaded_ms": spread_ms([0.2, None])}])
    assert "aim p99 < 100 ms idle met, loaded missed" in reported and "inf" not in reported


@pytest.mark.parametrize("compares", [True, False])
async def test_one_of_two_rivals_wins_and_a_worker_that_accepts_both_is_detected(compares: bool) -> None:
    worker: Any = OneWorker(compares=compares)
    mover = RoleChanger({"a": worker}, {"a": "mixed", "b": "mixed"})
    mover._possible = lambda: [("a", "prefill"), ("a", "decode"), ("a", "standby")]  # type: ignore[method-assign]
    await mover.move_against_rival({"a": worker})
    assert (mover.rival_rounds, mover.both_won, mover.none_won) == (1, not compares, 0)
    assert len(mover.moves) == (1 if compares else 2)
    assert mover.moves[-1].move.assignment.epoch == (6 if compares else 7)
