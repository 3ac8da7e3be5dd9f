"""Tests of the steps behind a worker's figures: their sums, and errors if they are missing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.errors import NoLongerStored, StoredElsewhere, UnknownWorker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWorker
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.testing.examples import examples
from libs.testing.workers.telemetry import MS, at, step, step_batch
from services.metrics.accounting.steps import StepsReport, steps_of

LIMIT = 1_000


def fleet_of(*batches):
    fleet = FleetTelemetry(prefill_shares)
    for batch in batches:
        fleet.add(batch, batch.covered_to_unix_ns)
    return fleet


def steps_report(fleet: FleetTelemetry, end_ms: float, window_ms: float, limit: int = LIMIT) -> StepsReport:
    return steps_of(fleet, "decode-0", at(end_ms), round(window_ms * MS), limit)


def test_each_step_has_its_tokens_and_its_part_of_the_window() -> None:
    steps = [
        step(0, 30, prefill=8),
        step(40, 60, decode=3),
        step(80, 120, prefill=64, decode=2),
        step(150, None, decode=4),
    ]
    batch = step_batch(1, (0, 200), steps, gpus=4, waits_ms=[(60, 70)])
    report = steps_report(fleet_of(batch), 200, 190)
    assert [
        (s.kind, s.prefill_tokens, s.prefill_sequences, s.decode_sequences, s.decode_kv_tokens) for s in report.steps
    ] == [("prefill", 8, 1, 0, 0), ("decode", 0, 0, 3, 300), ("mixed", 64, 1, 2, 200), ("decode", 0, 0, 4, 400)]
    assert [(s.start_unix_ns, s.end_unix_ns, s.running) for s in report.steps] == [
        (at(0), at(30), False), (at(40), at(60), False), (at(80), at(120), False), (at(150), at(200), True),
    ]  # fmt: skip
    assert [s.prefill_ns + s.decode_ns for s in report.steps] == [20 * MS, 20 * MS, 40 * MS, 50 * MS]
    assert 0 < report.steps[2].prefill_share < 1
    assert [(wait.start_unix_ns, wait.end_unix_ns) for wait in report.kv_waits] == [(at(60), at(70))]
    assert (report.gpus, report.gpu_ns.kv_wait, report.complete, report.left_out) == (4, 4 * 10 * MS, True, 0)


layouts = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60), st.booleans(), st.booleans(), st.booleans()), max_size=60
)


@settings(max_examples=examples(100), deadline=None)
@given(layouts, st.integers(0, 600), st.integers(100, 600), st.integers(1, 4))
def test_steps_add_up_to_their_figure_to_the_nanosecond(
    layout: list[tuple[int, int, bool, bool, bool]], low_ms: int, length_ms: int, gpus: int
) -> None:
    batches, now_ms = [], 0
    for number, (gap, length, prompts, tokens, comes) in enumerate(layout):
        end_ms = now_ms + gap + length
        ran = step(now_ms + gap, end_ms, prefill=64 * prompts, decode=3 * (tokens or not prompts))
        if comes:
            batches.append(step_batch(number, (now_ms, end_ms), [ran], gpus=gpus))
        now_ms = end_ms
    batches.append(step_batch(len(layout), (now_ms, now_ms + 1_300), gpus=gpus))
    fleet = fleet_of(*batches)
    end_ms = min(low_ms + length_ms, now_ms + 1_300)
    if at(end_ms) <= batches[0].covered_from_unix_ns:
        return
    report = steps_report(fleet, end_ms, length_ms)
    used = fleet.phases("decode-0", at(end_ms - length_ms), at(end_ms)).times(gpus)
    assert gpus * sum(each.prefill_ns for each in report.steps) == used.prefill_ns == report.gpu_ns.prefill
    assert gpus * sum(each.decode_ns for each in report.steps) == used.decode_ns == report.gpu_ns.decode


def test_of_too_many_steps_the_oldest_are_listed_and_the_others_counted() -> None:
    fleet = fleet_of(step_batch(1, (0, 1000), [step(10 * n, 10 * n + 5, decode=1) for n in range(100)]))
    report = steps_report(fleet, 1000, 995, limit=10)
    assert ([s.start_unix_ns for s in report.steps], report.left_out) == ([at(10 * n) for n in range(1, 11)], 89)


def test_an_unknown_worker_or_one_read_elsewhere_or_a_time_that_is_gone_is_refused_with_a_message() -> None:
    fleet = fleet_of(step_batch(1, (1_000, 2_000), [step(1_000, 1_500, decode=1)]))
    fleet.relay(SharedWorker(newest=step_batch(1, (0, 2_000), worker="other")), at(2_000), None, "metrics-2")
    with pytest.raises(UnknownWorker, match="'nobody' is not known"):
        steps_of(fleet, "nobody", at(2_000), 100 * MS, LIMIT)
    with pytest.raises(StoredElsewhere, match="'metrics-2'"):
        steps_of(fleet, "other", at(2_000), 100 * MS, LIMIT)
    with pytest.raises(NoLongerStored, match="Steps are kept for 660 s"):
        steps_report(fleet, 1_000, 500)
    assert not steps_report(fleet, 1_100, 500).complete


def test_steps_replaced_by_newer_ones_are_no_longer_listed() -> None:
    fleet = fleet_of(
        *(step_batch(n, (1000 * n, 1000 * n + 1000), [step(1000 * n, 1000 * n + 9, decode=1)]) for n in range(800))
    )
    assert steps_report(fleet, 800_000, 1_000).steps
    with pytest.raises(NoLongerStored):
        steps_report(fleet, 100_000, 1_000)
