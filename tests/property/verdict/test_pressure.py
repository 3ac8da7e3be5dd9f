"""Properties of pressure: it grows with work, falls with workers, and does not depend on cluster size."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from libs.policy.pressure import WorkerProfile, Workload
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.state import (
    AHEAD_NS,
    Prompts,
    RoleCounts,
    fewest_workers,
    least_pressed,
    pressures,
    workers_needed,
)

MS = 1_000_000
S = 1_000 * MS
MODEL = StepTimeModel(8e6, 6e4, 0.4, 15e6, 3e4, 25.0, interference=1.0)
ENGINE = WorkerProfile(MODEL, chunk_tokens=2048, max_sequences=256, kv_tokens=400_000)

works = st.builds(
    lambda prompts, decodes, context: Workload(prompts, decodes, decodes * context, 50 * MS),
    st.floats(0, 30),
    st.integers(0, 2000),
    st.integers(1, 8000),
)
standings = st.builds(
    lambda prefill, mixed, lending: RoleCounts(prefill, mixed, min(mixed, lending)),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 12),
)
prompts = st.builds(
    Prompts,
    st.lists(st.tuples(st.floats(0, 20e9), st.floats(0, 50e9)), max_size=6).map(tuple),
    st.floats(0, 20),
    st.floats(0.1e9, 20e9),
)


@given(prompts, st.floats(0, 5e9), st.floats(0, 20e9))
def test_more_prompts_need_no_fewer_workers(before: Prompts, work: float, left_ns: float) -> None:
    more = replace(before, waiting=(*before.waiting, (left_ns, work)))
    assert workers_needed(more)[0] >= workers_needed(before)[0] - 1e-9
    faster = replace(before, rate=before.rate * 1.5 + 0.1)
    assert workers_needed(faster)[0] >= workers_needed(before)[0] - 1e-9


@given(prompts, st.floats(0.1, 100))
def test_twice_the_work_needs_twice_the_workers(before: Prompts, times: float) -> None:
    scaled = Prompts(tuple((left, work * times) for left, work in before.waiting), before.rate * times, before.limit_ns)
    assert workers_needed(scaled)[0] == pytest.approx(workers_needed(before)[0] * times)


@given(prompts, st.floats(0.3e9, 60e9))
def test_no_horizon_needs_more_workers_than_reported(each: Prompts, horizon_ns: float) -> None:
    assume(horizon_ns <= each.limit_ns + AHEAD_NS)
    due = sum(work for left_ns, work in each.waiting if left_ns <= horizon_ns)
    need = (due + each.rate * max(horizon_ns - each.limit_ns, 0)) / horizon_ns
    assert workers_needed(each)[0] >= need - 1e-9


def test_arriving_prompts_count_before_any_of_them_waits() -> None:
    """Ten seconds beyond the deadline at twice what one worker computes."""
    need, horizon_ns = workers_needed(Prompts((), 2.0, 5e9))
    assert (need, horizon_ns) == (pytest.approx(2.0 * 10 / 15), 15e9)


@given(works, standings, st.floats(0, 3))
def test_pressures_grow_with_work(work: Workload, standing: RoleCounts, more: float) -> None:
    before = pressures(ENGINE, work, standing)
    prompts_more = pressures(ENGINE, replace(work, prompts=work.prompts + more), standing)
    assert prompts_more.prefill >= before.prefill - 1e-9
    assert prompts_more.cluster >= before.cluster - 1e-9
    assume(work.decodes)
    grown = replace(work, decodes=work.decodes * 2, kv_tokens=work.kv_tokens * 2)
    after = pressures(ENGINE, grown, standing)
    assert after.batch >= before.batch
    assert after.kv >= before.kv
    assert after.prefill >= before.prefill - 1e-9


@given(works, standings, st.integers(2, 5))
def test_pressures_do_not_depend_on_the_size_of_the_cluster(work: Workload, standing: RoleCounts, times: int) -> None:
    larger = Workload(work.prompts * times, work.decodes * times, work.kv_tokens * times, work.tpot_ns)
    scaled = RoleCounts(standing.prefill * times, standing.mixed * times, standing.lending * times)
    one, many = pressures(ENGINE, work, standing), pressures(ENGINE, larger, scaled)
    assert many.prefill == pytest.approx(one.prefill)
    assert many.decode == pytest.approx(one.decode)
    assert many.cluster <= one.cluster + 1e-9


@given(works, standings)
def test_no_other_split_has_less_pressure_than_the_cluster(work: Workload, standing: RoleCounts) -> None:
    found = pressures(ENGINE, work, standing)
    all_lend = pressures(ENGINE, work, replace(standing, lending=standing.mixed))
    assert found.cluster <= max(all_lend.prefill, all_lend.decode) + 1e-9
    assert min(found.prefill, found.batch, found.kv, found.cluster) >= 0


@given(st.floats(0, 30), st.integers(1, 8000), standings)
def test_a_mixed_worker_counts_once(prompts: float, context: int, standing: RoleCounts) -> None:
    """What decodes take of it is not there for prompts: with its decodes beyond their bound it computes none."""
    engine = replace(ENGINE, max_sequences=100_000)
    decodes = round(standing.mixed * 2_000)
    work = Workload(prompts, decodes, decodes * context, 50 * MS)
    lending = replace(standing, lending=standing.mixed)
    found = pressures(engine, work, lending)
    assert found.batch > 1.05
    alone = pressures(engine, work, replace(standing, lending=0))
    assert found.prefill == pytest.approx(alone.prefill)


@given(works, st.integers(1, 8))
def test_the_sufficient_number_of_workers_is_the_smallest(work: Workload, workers: int) -> None:
    needed = fewest_workers(ENGINE, work, workers, workers * 16)
    if needed is not None:
        assert least_pressed(ENGINE, work, needed).pressure <= 1
        assert needed == workers + 1 or least_pressed(ENGINE, work, needed - 1).pressure > 1
