"""Properties of advice and of the predicted range of its effect."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.planner.advice import (
    DEMAND_SPREAD,
    LEAST_GB_PER_S,
    Advice,
    AdviceKind,
    KvSpeed,
    advise,
    advise_links,
    best_chunk,
    settled,
)
from libs.policy.planner.due import NOTHING_USUAL, due_within_ns, prompts_wanted, strict_target_ns
from libs.policy.planner.limits import ModelLimits, best_split
from libs.policy.planner.scaling import FULL, workers_needed
from libs.policy.pressure import WorkerProfile, Workload, split
from libs.policy.step_time import StepTimeModel

MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e4, 25.0, interference=1.0)
ENGINE = WorkerProfile(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)
LIMITS = ModelLimits()


def advice(work: Workload, prefill: int, mixed: int, engine: WorkerProfile = ENGINE) -> dict[AdviceKind, Advice]:
    now = split(engine, work, prefill, mixed)
    needed = workers_needed(engine, work, prefill + mixed, LIMITS)
    return {each.kind: each for each in advise("m", engine, work, now, LIMITS, needed=needed)}


def work(prompts: float, decodes: int = 0, context: int = 1_000) -> Workload:
    return Workload(prompts, decodes, decodes * context, 50_000_000)


def test_the_strictest_target_shared_by_a_tenth_of_the_requests_counts() -> None:
    assert strict_target_ns([30] * 9) == 0, "too few to say"
    assert strict_target_ns([30] * 9 + [1]) == 30
    assert strict_target_ns([30] * 9 + [1] * 2) == 1


@given(st.floats(0, 10), st.floats(0, 1e10), st.floats(0, 1e11), st.floats(0, 1e11))
def test_a_longer_target_needs_no_more_workers_and_without_one_the_queue_must_start_within_a_second(
    served: float, waiting_ns: float, ttft_ns: float, longer_ns: float
) -> None:
    now, later = (
        prompts_wanted(served, waiting_ns, due_within_ns(each_ns)) for each_ns in (ttft_ns, ttft_ns + longer_ns)
    )
    assert later <= now * (1 + 1e-12)
    assert prompts_wanted(served, waiting_ns, due_within_ns(min(ttft_ns, 2e9))) == served + waiting_ns / 1e9


def test_prompts_far_beyond_the_usual_load_must_start_within_a_second_whatever_their_target() -> None:
    def of(served: float, waiting_s: float, due_s: float = 2.0) -> Workload:
        prompts = prompts_wanted(served, waiting_s * 1e9, due_s * 1e9)
        return replace(work(prompts), waiting_ns=waiting_s * 1e9, due_ns=due_s * 1e9)

    assert NOTHING_USUAL.judged(of(1.0, 2.0)).prompts == pytest.approx(3.0), "nothing has come before"
    usual = NOTHING_USUAL
    for second in range(1, 60):
        usual = usual.seen(of(1.0, 0.5), second * 1_000_000_000)
    assert usual.workers == pytest.approx(1.5, rel=0.05)
    assert usual.judged(of(1.0, 3.0)) == of(1.0, 3.0)
    assert settled(of(1.0, 3.0)).prompts == pytest.approx(1.3), "the queue within ten seconds, and all arrivals"
    flood = usual.judged(replace(of(1.0, 4.0), held_prompts=prompts_wanted(0.0, 1e9, 2e9)))
    assert (flood.prompts, flood.held_prompts, flood.due_ns) == (pytest.approx(5.0), 1.0, 1e9)
    assert usual.judged(of(9.0, 9.0, due_s=1.0)) == of(9.0, 9.0, due_s=1.0)


def test_without_pressure_there_is_no_advice() -> None:
    assert advice(work(0.3, 10), 2, 2) == {}


@given(st.floats(5, 30), st.floats(0, 1), st.floats(0, 1), st.floats(1 - DEMAND_SPREAD, 1 + DEMAND_SPREAD))
def test_added_workers_relieve_as_predicted_whatever_demand_and_queue_do(
    prompts: float, queued: float, left: float, factor: float
) -> None:
    pressing = replace(work(prompts), waiting_ns=queued * prompts * 1e9)
    found = advice(pressing, 2, 2).get(AdviceKind.ADD_WORKERS)
    assert found is not None and found.low <= found.high <= 0
    added = int(found.what.split()[1])
    here = split(ENGINE, pressing, 2, 2).pressure
    then = work(prompts * (1 - queued) * factor + prompts * queued * left)
    prefill = 2 + int(found.what.split("(")[1].split()[0]) if "to prefill" in found.what else 2
    there = split(ENGINE, then, prefill, 4 + added - prefill).pressure
    assert found.low - 1e-6 <= there - here <= found.high + 1e-6
    assert found.high - found.low <= -found.low, "no wider than the effect"


def test_if_prompts_wait_for_slots_to_decode_the_prediction_spans_empty_to_full_new_workers() -> None:
    few = replace(ENGINE, max_sequences=32)
    full = replace(work(4.0, 64), waiting_ns=3e9, held=60, held_kv_tokens=60_000, held_prompts=3.0)
    now = split(few, full, 1, 2)
    found = advice(full, 1, 2, few)[AdviceKind.ADD_WORKERS]
    assert "to decode" in found.what
    then = best_split(few, full, int(found.what.split()[1]) + 3)
    assert then is not None
    ended, joined = (64 / (32 * then.mixed) * (1 - DEMAND_SPREAD), 124 / (32 * then.mixed) * (1 + DEMAND_SPREAD))
    assert found.low == pytest.approx(ended - now.pressure, abs=0.03)
    assert found.high == pytest.approx(joined - now.pressure, abs=0.03)


def test_a_chunk_too_small_for_the_device_is_named_with_a_better_one() -> None:
    small = replace(ENGINE, chunk_tokens=64)
    found = advice(work(0.3), 2, 2, small)[AdviceKind.CHUNK]
    best = best_chunk(small)
    assert found.what.startswith(f"prefill chunk {best:,} in place of 64")
    assert found.low <= (replace(ENGINE, chunk_tokens=best).chunk_speed - small.chunk_speed) * 1e9 <= found.high
    assert AdviceKind.CHUNK not in advice(work(0.3), 2, 2, replace(ENGINE, chunk_tokens=best))


def test_a_model_of_short_prompts_under_decode_pressure_is_better_aggregated() -> None:
    hides = replace(ENGINE, step_time=replace(MODEL, interference=0.0))
    pressed = work(0.4, 700)
    now = split(hides, pressed, 2, 2)
    assert now.pressure > FULL
    found = advice(pressed, 2, 2, hides)[AdviceKind.AGGREGATE]
    assert "hide beside decodes" in found.what and found.high <= 0


def test_a_link_far_slower_than_the_others_is_named_and_predicted_to_match_them() -> None:
    found = advise_links([KvSpeed("a", 12.0, True), KvSpeed("b", 11.0, True), KvSpeed("c", 0.6, True)])
    assert found is not None and found.kind is AdviceKind.LINK
    assert "KV comes to c at 0.6 GB/s, to others at 12.0" in found.what
    assert (found.low, found.high) == (6.0 - 0.6, 12.0 - 0.6)


def test_equal_links_are_ignored_unless_they_are_slower_than_any_gpu_link() -> None:
    assert advise_links([]) is None
    assert advise_links([KvSpeed("a", 12.0, True), KvSpeed("b", 7.0, True)]) is None
    assert advise_links([KvSpeed("a", 0.3, False), KvSpeed("b", 0.05, False)]) is None, "CPUs send little at a time"
    found = advise_links([KvSpeed("a", 0.3, True)])
    assert found is not None and 0 < found.low < found.high <= 2 * LEAST_GB_PER_S
