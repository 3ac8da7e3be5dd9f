"""Tests of TaiChi's flowing decodes, worked out by hand."""

from dataclasses import replace

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.rivals.port import SeenSequence, SeenWorker, SequenceMove
from libs.lab.rivals.taichi import PREFILL_HEAVY_BUDGET_TOKENS, FlowingDecodes, TaiChiRouter, taichi
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.roles import Role
from tests.rival_rig import MS, cluster, mixed, prefill, request

LIMIT_NS = 50 * MS


def heavy(index: int, **fields: object) -> SeenWorker:
    return mixed(index, budget_tokens=PREFILL_HEAVY_BUDGET_TOKENS, **fields)


def light(index: int, **fields: object) -> SeenWorker:
    return mixed(index, budget_tokens=256, **fields)


def sequence(number: int, worker: int, *, output: int, tpot_ns: float = 0.0, kv: int = 1000) -> SeenSequence:
    return SeenSequence(number, worker, kv, output, tpot_ns, LIMIT_NS)


def test_with_flow_all_instances_are_mixed_and_prefill_heavy_ones_initially_compute_only_prompts() -> None:
    rival = taichi(1, 2, flow=True)
    moves = rival.first_roles(cluster(3))
    assert [(each.role, each.budget_tokens) for each in moves] == [
        (Role.MIXED, 1024), (Role.MIXED, 256), (Role.MIXED, 256),
    ]  # fmt: skip
    assert [rival.prompt_only(each) for each in (heavy(0), light(1), prefill(2))] == [True, False, True]
    with pytest.raises(InvalidRequest, match="1 to 1023"):
        taichi(1, 2, PREFILL_HEAVY_BUDGET_TOKENS)


def test_decodes_begin_on_decode_heavy_instances_wherever_their_prompt_was_computed() -> None:
    router = taichi(1, 2, flow=True).router(cluster(3))
    workers = [heavy(0), light(1, decodes=2), light(2, decodes=1)]
    assert router.decode(request(), 0, workers, 0) == 2
    assert router.decode(request(), 1, workers, 0) == 1


def test_the_longest_answers_leave_a_decode_heavy_instance_over_the_watermark() -> None:
    flowing = FlowingDecodes(TaiChiRouter())
    # 100,000 tokens of KV each: 97,000 are 2,000 over the watermark, which two sequences of 1,500 tokens cover.
    full = light(1, decodes=3, kv_tokens=97_000)
    answers = [sequence(each, 1, output=output, kv=1500) for each, output in enumerate((50, 300, 200))]
    moves = flowing.sequence_moves([heavy(0), full, light(2, kv_tokens=1000), heavy(3)], answers)
    assert moves == [SequenceMove(1, 0), SequenceMove(2, 3)]
    assert not flowing.sequence_moves([heavy(0), light(1, decodes=3, kv_tokens=94_000)], answers)


def test_a_sequence_returns_before_it_misses_its_tpot_if_a_decode_heavy_instance_has_room() -> None:
    flowing = FlowingDecodes(TaiChiRouter())
    # The limit is 50 ms, of which 96 % are 48.
    answers = [sequence(1, 0, output=10, tpot_ns=47.9 * MS), sequence(2, 0, output=10, tpot_ns=48 * MS)]
    assert flowing.sequence_moves([heavy(0), light(1, decodes=2), light(2)], answers) == [SequenceMove(2, 2)]
    assert not flowing.sequence_moves([heavy(0), light(1, kv_tokens=95_000)], answers)


@pytest.mark.usefixtures("quiet_lab")
def test_sequences_that_flow_complete_with_every_token() -> None:
    trace = generate("poisson:rate=12,seconds=20,isl=1500,osl=200", seed=1)
    base = Experiment(trace, resolve("llama-3.1-8b", "h100"), 4, parse_slo("ttft=max(2s,3x),tpot=50ms"))
    policy = policy_named("taichi-flow:2:2", 4)
    assert policy.rival is not None

    class ToAndFro(FlowingDecodes):
        """Moves each sequence to the next worker after every tenth token."""

        def sequence_moves(self, workers, sequences):  # type: ignore[no-untyped-def]
            return [
                SequenceMove(each.number, (each.worker + 1) % len(workers))
                for each in sequences
                if each.output_tokens % 10 == 0
            ]

    moving = replace(policy.rival, sequence_mover=lambda cluster: ToAndFro(TaiChiRouter()))
    report, result = run(base, replace(policy, rival=moving))
    assert report.moved_sequences > len(trace.requests)
    assert all(answer.outcome is LabOutcome.COMPLETED for answer in result.answers)
    assert all(answer.tokens == answer.request.output_tokens for answer in result.answers)
