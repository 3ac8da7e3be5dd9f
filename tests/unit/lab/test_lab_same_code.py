"""Tests that the lab runs the live system's decisions, so that a change affects both."""

import pytest

from libs.lab.experiment import Experiment, run
from libs.lab.hardware import resolve
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.policy.gateway import outlook
from libs.policy.worker import credits as worker_credits
from libs.policy.worker import pace
from libs.testing.workers.hosts import gateway_probe, local_worker

pytestmark = pytest.mark.system
"""Because of the live worker."""


def lab_run(spec: str, policy: str, workers: int = 4) -> tuple[object, int, float]:
    made = Experiment(generate(spec, seed=2), resolve("llama-3.1-8b", "h100"), workers, parse_slo("ttft=2s,tpot=30ms"))
    report, result = run(made, policy_named(policy, workers))
    most = max(worker.credits.prefill.slots for worker in result.workers)
    return report.score, most, report.score.tpot_s["p99"]


async def live_prefill_credits() -> int:
    async with local_worker("p", "prefill") as worker, gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits)
        return gateway.prefill_credits


async def test_the_number_of_prompts_that_a_worker_accepts_changes_live_and_in_the_lab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, in_lab = await live_prefill_credits(), lab_run("poisson:rate=4,seconds=10", "fulcrum:2:2")[1]
    monkeypatch.setattr(worker_credits, "prefill_slots", lambda facts: 3)
    assert live > 3 and in_lab > 3
    assert await live_prefill_credits() == 3
    assert lab_run("poisson:rate=4,seconds=10", "fulcrum:2:2")[1] == 3


def test_decodes_are_submitted_with_the_prompts_that_begin_at_once_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "poisson:rate=4,isl=500,osl=20,seconds=10"
    early = lab_run(spec, "fulcrum:2:2")[2]
    monkeypatch.setattr(outlook.WorkerOutlook, "begins_at_once", lambda self, tokens: False)
    assert early < lab_run(spec, "fulcrum:2:2")[2]


def test_the_slack_budget_is_the_one_that_engines_use(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "poisson:rate=12,isl=3000,osl=100,seconds=10"
    before = lab_run(spec, "aggregated:4096+guard")[0]
    monkeypatch.setattr(pace, "step_limit_ns", lambda decode_ns, lines, *, now_ns: 2 * decode_ns)
    assert lab_run(spec, "aggregated:4096+guard")[0] != before


def test_the_decode_guard_is_the_one_that_engines_use(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "poisson:rate=30,isl=3000,osl=300,seconds=15"
    calls: list[int] = []
    plain = pace.AnswerLengths.one_ends

    def counted(self: pace.AnswerLengths, running: object, steps: float) -> bool:
        calls.append(1)
        return plain(self, running, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(pace.AnswerLengths, "one_ends", counted)
    lab_run(spec, "fulcrum:3:1")
    assert calls
