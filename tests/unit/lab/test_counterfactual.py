"""Tests that replay demand with and without a decision, and infer roles before it."""

from dataclasses import replace
from typing import Any

import pytest

from libs.cli.planner.in_lab import standing_before
from libs.contracts.errors import InvalidRequest, StartupError
from libs.lab.counterfactual import RoleAndBudget, counterfactual
from libs.lab.experiment import Experiment
from libs.lab.hardware import Hardware, by_name
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.perfmodel.profiles import profile
from libs.policy.roles import Role
from load.planner.stories import bursts, made

PREFILL, DECODE, LENT = RoleAndBudget(Role.PREFILL), RoleAndBudget(Role.MIXED), RoleAndBudget(Role.MIXED, 2048)
SPLIT = [PREFILL, DECODE, DECODE, DECODE]


def experiment(spec: str) -> Experiment:
    return Experiment(generate(spec, seed=1), by_name("llama-8b-h100"), 4, parse_slo("ttft=500ms,tpot=50ms"))


def test_a_move_towards_a_flood_of_prompts_is_useful_and_its_reversal_is_not() -> None:
    flooded = experiment("poisson:rate=14,isl=4000,osl=8,spread=0.1,seconds=16")
    found = counterfactual(flooded, SPLIT, {1: PREFILL, 2: PREFILL}, at_s=4.0)
    assert found.without.requests == found.with_it.requests > 50
    assert found.useful and found.without.good < found.with_it.good
    back = counterfactual(flooded, [PREFILL] * 3 + [DECODE], {1: DECODE, 2: DECODE}, at_s=4.0)
    assert not back.useful
    assert back.with_it.ttft_ms["mean"] > back.without.ttft_ms["mean"]


def test_a_change_without_effect_is_not_useful() -> None:
    quiet = experiment("poisson:rate=1,isl=200,osl=8,spread=0.1,seconds=16")
    found = counterfactual(quiet, SPLIT, {1: LENT}, at_s=4.0)
    assert not found.useful
    assert found.without.good == found.with_it.good == 1.0


def test_without_requests_around_a_decision_there_is_no_comparison() -> None:
    early = experiment("poisson:rate=5,isl=200,osl=8,spread=0.1,seconds=4")
    with pytest.raises(InvalidRequest, match="no request"):
        counterfactual(early, SPLIT, {1: LENT}, at_s=60.0)
    with pytest.raises(InvalidRequest, match="none came after it"):
        counterfactual(early, SPLIT, {1: LENT}, at_s=5.0)
    assert replace(early, workers=4) == early


@pytest.mark.parametrize("at_s", [5.3, 5.35, 5.4, 5.7])
def test_budgets_in_a_burst_are_useful_in_whatever_order_they_are_set(at_s: float) -> None:
    """A sequence that joins a mixed worker waits for no step that makes its second token late."""
    gpus = replace(profile("llama-70b-tp4-h100"), step_time=profile("llama-70b-tp4-h100").step_time.scaled(2.5))
    burst = Experiment(
        trace=made(bursts(9), 1),
        hardware=Hardware(gpus, mixed_measured=True),
        workers=16,
        slo=parse_slo("ttft=max(5s,3x),tpot=120ms"),
        link_gbps=100.0,
        chunk_tokens=2048,
        max_sequences=16,
    )
    standing = [RoleAndBudget(Role.PREFILL)] * 8 + [RoleAndBudget(Role.MIXED)] * 8
    found = counterfactual(burst, standing, {index: RoleAndBudget(Role.MIXED, 2048) for index in range(8, 16)}, at_s)
    assert found.useful and found.with_it.good == found.without.good == 1.0


def decision(number: int, *changes: tuple[str, str, str]) -> dict[str, Any]:
    """(worker, before, after) each; those of mixed workers have 512 tokens."""

    def budget(role: str) -> int:
        return 512 if role == "mixed" else 0

    return {
        "id": str(number), "sequence": number, "decided_unix_ns": number, "model": "m",
        "changes": [
            {
                "worker": worker, "role": after, "budget_tokens": budget(after), "epoch": 2, "before": before,
                "before_budget_tokens": budget(before),
            }
            for worker, before, after in changes
        ],
    }  # fmt: skip


def worker(name: str, role: str) -> dict[str, Any]:
    return {"id": name, "model": "m", "role": role, "budget_tokens": 512 if role == "mixed" else 0}


def test_roles_before_a_decision_are_inferred_from_present_roles_and_later_decisions() -> None:
    decisions = [
        decision(1, ("a", "decode", "mixed"), ("b", "decode", "mixed")),
        decision(2, ("a", "mixed", "prefill")),
        decision(3, ("b", "mixed", "decode")),
    ]
    now = [worker("a", "prefill"), worker("b", "decode"), worker("c", "standby")]
    lent = RoleAndBudget(Role.MIXED, 512)
    assert standing_before(decisions[0], now, decisions) == {"a": DECODE, "b": DECODE}
    assert standing_before(decisions[1], now, decisions) == {"a": lent, "b": lent}
    assert standing_before(decisions[2], now, decisions) == {"a": PREFILL, "b": lent}
    with pytest.raises(StartupError, match="b is gone"):
        standing_before(decisions[2], now[:1], decisions)
    with pytest.raises(InvalidRequest, match="standby"):
        standing_before(decision(4, ("c", "decode", "standby")), now, decisions)
