"""Tests of SGLang's division of SMs between prefill and decode inside one GPU."""

import pytest

from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.rivals.port import SeenWorker
from libs.lab.rivals.sglang_pdmux import SmDivider, budget_tokens, prefill_share, sglang_pdmux
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.roles import Role
from tests.rival_rig import cluster, mixed, seen


def test_prompts_get_fewer_sms_the_more_sequences_decode() -> None:
    shares = [prefill_share(decodes) for decodes in (0, 1, 11, 12, 18, 24, 30, 36, 500)]
    assert shares == [each / 132 for each in (132, 112, 112, 104, 96, 88, 80, 72, 72)]


def test_a_budget_is_what_the_prefill_stream_computes_during_the_step() -> None:
    # At 72 of 132 SMs and 0.1 ms a token, 552 tokens take the 46 ms of the decodes and the 55 ms of the tokens.
    assert budget_tokens(mixed(0, decodes=36)) == pytest.approx(552, abs=5)
    idle = mixed(0)
    assert budget_tokens(idle) == idle.speed.chunk_tokens


def test_sequences_whose_prompts_are_being_computed_take_no_sms_from_prompts() -> None:
    alone = mixed(0, decodes=1, prefills=1)
    assert budget_tokens(alone) == alone.speed.chunk_tokens
    assert budget_tokens(mixed(0, decodes=40, prefills=4)) == budget_tokens(mixed(0, decodes=36))


@pytest.mark.usefixtures("quiet_lab")
def test_the_lab_knows_which_sequences_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one request at a time, a worker has either a prompt or a decode, and a prompt alone has all SMs."""
    found = set()

    def recorded(worker: SeenWorker) -> int:
        tokens = budget_tokens(worker)
        found.add((worker.decodes, worker.prefills, tokens == worker.speed.chunk_tokens))
        return tokens

    monkeypatch.setattr("libs.lab.rivals.sglang_pdmux.budget_tokens", recorded)
    trace = generate("poisson:rate=0.05,seconds=200,isl=30000,osl=300", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 1, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    run(base, policy_named("sglang-pdmux", 1))
    assert {(1, 1, True), (1, 0, False)} <= found <= {(0, 0, True), (1, 1, True), (1, 0, False)}


def test_only_budgets_change_and_only_where_they_differ_by_a_tenth() -> None:
    busy = mixed(0, decodes=36)
    (move,) = SmDivider().moves(seen([busy]))
    assert (move.index, move.role, move.budget_tokens) == (0, Role.MIXED, budget_tokens(busy))
    busy.budget_tokens = round(1.05 * move.budget_tokens)
    assert not SmDivider().moves(seen([busy]))
    assert {each.role for each in sglang_pdmux().first_roles(cluster(3))} == {Role.MIXED}


@pytest.mark.usefixtures("quiet_lab")
def test_requests_complete_without_a_role_move() -> None:
    trace = generate("flipflop:rate=10,seconds=20,period=10,isl=3000,osl=100", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 2, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    report, result = run(base, policy_named("sglang-pdmux", 2))
    assert report.role_moves == 0
    assert all(answer.outcome is LabOutcome.COMPLETED for answer in result.answers)
