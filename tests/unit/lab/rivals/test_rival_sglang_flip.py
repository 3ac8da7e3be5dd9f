"""Tests of SGLang's flips by threshold: when a worker changes sides, and what it does until then."""

import pytest

from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.rivals.port import Move
from libs.lab.rivals.sglang_flip import ThresholdMover, sglang_flip
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.roles import Role
from tests.rival_rig import cluster, mixed, prefill, seen


def test_the_emptiest_decode_worker_flips_when_prompts_wait_for_half_the_ttft_target() -> None:
    # 6,000 tokens are 600 ms of a target of 1 s.
    prefills = [prefill(0, prompt_tokens=6000), prefill(1, prompt_tokens=6000)]
    decoders = [mixed(2, decodes=9), mixed(3, decodes=4)]
    assert ThresholdMover().moves(seen([*prefills, *decoders])) == [Move(3, Role.PREFILL, 0, "prefill over its limit")]
    # One of both would have to do what takes them 10 + 29 = 39 ms each, of 50.
    assert not ThresholdMover().moves(seen([*prefills, mixed(2, decodes=29), mixed(3, decodes=29)]))
    # The only decode worker stays.
    assert not ThresholdMover().moves(seen([*prefills, decoders[0]]))


def test_a_prefill_worker_flips_when_decodes_are_over_their_limit_and_prompts_hardly_wait() -> None:
    # 10 + 37 = 47 ms of 50; backlogs of 100 and 50 ms.
    prefills = [prefill(0, prompt_tokens=1000), prefill(1, prompt_tokens=500)]
    assert ThresholdMover().moves(seen([*prefills, mixed(2, decodes=37)])) == [
        Move(1, Role.MIXED, 0, "decode over its limit")
    ]
    assert not ThresholdMover().moves(seen([prefills[0], mixed(2, decodes=37)]))
    assert not ThresholdMover().moves(seen([prefill(0, prompt_tokens=6000), prefills[1], mixed(2, decodes=37)]))


def test_nothing_flips_while_another_worker_drains() -> None:
    prefills = [prefill(0, prompt_tokens=6000), prefill(1, prompt_tokens=6000, ready=False)]
    assert not ThresholdMover().moves(seen([*prefills, mixed(2), mixed(3)]))


def test_a_flip_waits_until_the_worker_is_idle() -> None:
    cost = sglang_flip().move_cost
    assert (cost.drains, cost.restarts) == (True, False)
    assert [each.role for each in sglang_flip(1, 2).first_roles(cluster(3))] == [Role.PREFILL, Role.MIXED, Role.MIXED]


@pytest.mark.usefixtures("quiet_lab")
def test_draining_workers_finish_their_requests_and_none_is_lost() -> None:
    trace = generate("flipflop:rate=14,seconds=40,period=10,isl=6000,osl=200", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 4, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    report, result = run(base, policy_named("sglang-flip", 4))
    assert report.role_moves > 0
    assert report.score.aborted == 0
    assert all(answer.outcome is LabOutcome.COMPLETED for answer in result.answers)
