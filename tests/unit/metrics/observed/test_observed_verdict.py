"""Tests in virtual time of telemetry, verdict, advice and traffic of observed servers."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from libs.policy.verdict.causes import CauseCode
from libs.policy.verdict.state import PodLabel
from services.metrics.observed.server import ServerState
from services.metrics.observed.traffic import percentile
from tests.observe_rig import Load
from tests.unit.metrics.observed.observed_rig import BUSY, PAIR, SECOND_NS, Observed, suite


async def test_a_calm_fleet_is_balanced_and_all_its_times_are_estimates_with_bounds() -> None:
    observed = suite({"p0": BUSY, "d0": BUSY, "d1": BUSY}, PAIR)
    status = await observed.run(20)
    assert status.verdict.code == CauseCode.BALANCED
    assert status.live
    assert status.observed is not None
    assert [each.state for each in status.observed.servers] == ["observed"] * 3
    for estimate in (status.estimate, *(each.estimate for each in status.workers), status.models[0].estimate):
        assert estimate is not None
        assert estimate.low is not None and estimate.prefill is not None and estimate.high is not None
        assert 0 <= estimate.low < estimate.prefill < estimate.high <= 1
        assert estimate.prefill == pytest.approx(0.05, abs=0.04)  # 35 ms of a prompt in each second
    assert all(batch.HasField("estimate") for batch in observed.bus.batches)
    assert status.models[0].decode.busy == pytest.approx(1.0, abs=0.05)
    assert status.models[0].decode.tpot_ms == pytest.approx(10, abs=1)
    assert status.traffic.requests_per_s == pytest.approx(3, abs=0.5)
    assert status.traffic.ttft_p50_ms == pytest.approx(175, abs=80)


async def test_a_flood_of_prompts_names_prefill_and_gives_advice_without_a_command() -> None:
    observed = suite({"p0": BUSY, "d0": BUSY, "d1": BUSY}, PAIR)
    await observed.run(15)
    observed.fakes["p0"].set(Load(decoding=4, prompts_per_s=30, waiting=40, waiting_per_s=20, ttft_s=3))
    status = await observed.run(5)
    assert status.verdict.code == CauseCode.PREFILL_BOUND
    assert status.verdict.action is not None
    assert status.verdict.action.command == ""
    assert "for prefill" in status.verdict.action.instruction
    assert "fulcrum role" not in status.verdict.sentence + status.verdict.action.instruction


async def test_advice_for_pods_has_the_command_that_changes_their_label() -> None:
    observed = Observed(PAIR, pods=LlmdPods())
    for fake in observed.fakes.values():
        fake.set(BUSY)
    await observed.run(15)
    observed.fakes["p0"].set(Load(decoding=4, prompts_per_s=30, waiting=40, waiting_per_s=20, ttft_s=3))
    action = (await observed.run(5)).verdict.action
    assert action is not None
    (server,) = action.workers
    command = f"kubectl --namespace serving label --overwrite pod {server} llm-d.ai/role=prefill"
    assert command in action.instruction


class LlmdPods:
    """Pods that do not change, with the label of llm-d."""

    label = PodLabel("serving", "llm-d.ai/role")
    trouble = ""
    targets = ()

    async def follow(self, changed: Callable[[], None]) -> None: ...


async def test_a_flood_of_decodes_names_decode() -> None:
    observed = suite({"p0": BUSY, "p1": BUSY, "d0": BUSY}, {"p0": "prefill", "p1": "prefill", "d0": "decode"}, 20.0)
    await observed.run(15)
    observed.fakes["d0"].set(Load(decoding=200, waiting=80, kv_used=0.99, step_s=0.03))
    status = await observed.run(5)
    assert status.verdict.code in (CauseCode.DECODE_BOUND_KV, CauseCode.DECODE_BOUND_TPOT)


async def test_floods_of_both_phases_make_the_fleet_too_small() -> None:
    observed = suite({"p0": BUSY, "d0": BUSY}, {"p0": "prefill", "d0": "decode"})
    await observed.run(15)
    observed.fakes["p0"].set(Load(decoding=4, prompts_per_s=30, waiting=400, waiting_per_s=60, ttft_s=3))
    observed.fakes["d0"].set(Load(decoding=250, waiting=200, kv_used=0.99, step_s=0.03))
    status = await observed.run(8)
    assert status.verdict.code == CauseCode.TOO_SMALL


async def test_servers_that_all_do_both_phases_get_no_advice_to_change_roles() -> None:
    observed = suite({"a": BUSY, "b": BUSY}, {"a": "mixed", "b": "mixed"})
    await observed.run(15)
    for fake in observed.fakes.values():
        fake.set(Load(decoding=24, prompts_per_s=30, waiting=200, waiting_per_s=40, ttft_s=3))
    status = await observed.run(6)
    assert status.verdict.code in (CauseCode.PREFILL_BOUND, CauseCode.TOO_SMALL)
    assert status.verdict.action is None
    assert "0 prefill workers" not in status.verdict.sentence


async def test_a_server_that_goes_away_is_silent_and_has_the_same_identity_when_it_returns() -> None:
    observed = suite({"p0": BUSY, "d0": BUSY, "d1": BUSY}, PAIR)
    await observed.run(12)
    observed.away = {"d1"}
    status = await observed.run(4)
    assert status.verdict.code == CauseCode.SILENT_WORKER
    assert "d1" in status.verdict.sentence
    assert status.observed is not None
    assert [(each.name, each.trouble) for each in status.observed.servers if each.state == "away"] == [
        ("d1", "away (refused)")
    ]
    observed.away = set()
    observed.fakes["d1"].restart()
    status = await observed.run(6)
    assert status.verdict.code == CauseCode.BALANCED
    assert status.observed is not None
    assert {each.name: each.restarts for each in status.observed.servers} == {"p0": 0, "d0": 0, "d1": 1}
    assert len(status.workers) == 3


async def test_a_restart_causes_no_spike() -> None:
    observed = suite({"d0": BUSY}, {"d0": "mixed"})
    await observed.run(12)
    observed.fakes["d0"].restart()
    status = await observed.run(2)
    assert max(batch.estimate.busy_ns for batch in observed.bus.batches) <= 0.51 * SECOND_NS
    assert status.traffic.prompt_tokens_per_s < 1_500
    assert status.traffic.requests_per_s < 1.5


async def test_a_server_with_an_invalid_answer_affects_no_other() -> None:
    observed = suite({"p0": BUSY, "d0": BUSY, "d1": BUSY}, PAIR)
    observed.fakes["d1"].body = b"<html>"
    status = await observed.run(15)
    assert status.observed is not None
    assert [each.state for each in status.observed.servers] == ["observed", "observed", "foreign"]
    assert "no metric of vLLM's" in status.observed.servers[2].trouble
    assert status.verdict.code == CauseCode.BALANCED


async def test_a_fleet_without_servers_is_unknown_rather_than_idle() -> None:
    observed = suite({}, PAIR)
    observed.away = set(PAIR)
    status = await observed.run(3)
    assert status.verdict.code == CauseCode.UNKNOWN
    assert status.not_live_because == "no observed server answers"


async def test_time_is_unknown_and_no_server_is_stuck_while_step_costs_are_learned() -> None:
    """Prompts that may have overlapped cannot be learned from."""
    observed = suite({"p0": Load(prompts_per_s=20)}, {"p0": "prefill"})
    await observed.run(15)
    assert observed.fleet.server("p0").state is ServerState.LEARNING
    assert all(batch.covered_from_unix_ns == batch.covered_to_unix_ns for batch in observed.bus.batches)
    assert not [each for each in observed.alerts.book.firing() if each.name == "FulcrumWorkerStuck"]


async def test_a_prefill_server_is_learned_from_prompts_that_ran_one_after_another() -> None:
    """35 ms each of 12 prompts a second: busy 0.42 of the time, although one request runs at most."""
    observed = suite({"p0": Load(prompts_per_s=12)}, {"p0": "prefill"})
    status = await observed.run(20)
    assert observed.fleet.server("p0").state is ServerState.OBSERVED
    assert status.estimate is not None
    assert status.estimate.prefill == 1.0
    assert status.models[0].prefill.busy == pytest.approx(0.42, abs=0.15)


@pytest.mark.parametrize(
    ("counts", "percent", "found"),
    [
        ({(0.0, 1.0): 4.0}, 50, 0.5),
        ({(0.0, 1.0): 1.0, (1.0, 2.0): 1.0}, 75, 1.5),
        ({(0.0, 1.0): 1.0, (5.0, float("inf")): 9.0}, 95, 5.0),
        ({}, 50, None),
    ],
)
def test_percentiles_lie_within_their_bucket(
    counts: Mapping[tuple[float, float], float], percent: int, found: float | None
) -> None:
    assert percentile(counts, percent) == found


def test_the_servers_shown_are_those_of_the_list() -> None:
    observed = Observed({"b": "mixed", "a": "mixed"})
    names: Sequence[str] = [each.name for each in observed.fleet.status().servers]
    assert names == ["b", "a"]
