"""Properties of data-parallel groups as sums of their ranks, and of dummy steps as a part of idle time."""

import dataclasses

import hypothesis.strategies as st
from hypothesis import given

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import DummySteps, Interval, StepBatch
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import History
from libs.telemetry.rollups import RollUps
from libs.telemetry.workers import Members
from libs.testing.workers.telemetry import MS, at, step, step_batch, write_windows
from services.metrics.accounting.answer import ClusterOccupancy
from services.metrics.accounting.occupancy import cluster_occupancy
from services.metrics.accounting.series import history, parse_scope, sums

SPAN_MS = 400
COUNTS = ("gpus", "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "places", "dummy_steps")

pieces = st.lists(
    st.tuples(st.sampled_from(["idle", "prefill", "decode", "both", "encode", "wait"]), st.integers(1, 90)),
    min_size=1,
    max_size=9,
)
spans = st.lists(st.tuples(st.integers(0, SPAN_MS), st.integers(1, 60)), max_size=6)
ranks = st.lists(
    st.tuples(
        st.sampled_from(["", "g", "h"]),
        st.sampled_from(["m", "n/m"]),
        st.integers(1, 8),
        pieces,
        spans,
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=5,
)


def batch_of(number: int, rank: tuple) -> StepBatch:
    """Return a rank's batch from 0 until its pieces or `SPAN_MS` end."""
    group, model, gpus, done, dummies, depth = rank
    steps, waits, now = [], [], 0
    for kind, duration in done:
        start, now = now, min(now + duration, SPAN_MS)
        if start < now and kind == "wait":
            waits.append((start, now))
        elif start < now and kind == "encode":
            steps.append(step(start, now)._replace(prefill_sequences=1, encoded_images=1))
        elif start < now and kind != "idle":
            steps.append(step(start, now, prefill=7 * (kind != "decode"), decode=3 * (kind != "prefill")))
    batch = step_batch(1, (0, now), steps, waits_ms=waits, worker=f"w-{number}", model=model, gpus=gpus)
    batch.group, batch.max_sequences = group, 4 + depth
    batch.load.running, batch.load.waiting, batch.load.awaiting_kv = depth, 2 * depth, 3
    ended = [(start, start + length) for start, length in dummies if start + length <= now]
    said = [Interval(start_unix_ns=at(start), end_unix_ns=at(end)) for start, end in ended]
    batch.dummy_steps.CopyFrom(DummySteps(steps=len(ended), spans=said))
    return batch


class Kept:
    """The figures that a metrics service computes from batches."""

    def __init__(self, batches: list[StepBatch]) -> None:
        self.fleet, self.rollups, self.members = FleetTelemetry(prefill_shares), RollUps(), Members()
        for batch in batches:
            self.fleet.add(batch, batch.covered_to_unix_ns)
        write_windows(History(self.fleet, self.rollups, self.members), 0, 1000)

    def occupancy(self) -> ClusterOccupancy:
        return cluster_occupancy(self.fleet, self.rollups, self.members, at(SPAN_MS), SPAN_MS * MS)


@given(ranks)
def test_a_group_is_the_sum_of_its_ranks_to_the_nanosecond(ranks: list[tuple]) -> None:
    kept = Kept([batch_of(*each) for each in enumerate(ranks)])
    cluster = kept.occupancy()
    by_id = {worker.id: worker for worker in cluster.workers}
    grouped = [rank for group in cluster.groups for rank in group.ranks]
    assert sorted(grouped) == [worker.id for worker in cluster.workers if worker.group]
    for group in cluster.groups:
        members = [by_id[rank] for rank in group.ranks]
        assert {(each.model, each.group) for each in members} == {(group.model, group.group)}
        for field in dataclasses.fields(group.gpu_ns):
            assert getattr(group.gpu_ns, field.name) == sum(getattr(each.gpu_ns, field.name) for each in members)
        for name in (*COUNTS, "due_gpu_ns", "dummy_gpu_ns", "encode_gpu_ns"):
            assert getattr(group, name) == sum(getattr(each, name) for each in members)
        assert group.coverage == (group.gpu_ns.covered / group.due_gpu_ns if group.due_gpu_ns else 0)


@given(ranks)
def test_the_history_of_a_group_is_the_sum_of_its_ranks_to_the_nanosecond(ranks: list[tuple]) -> None:
    kept = Kept([batch_of(*each) for each in enumerate(ranks)])
    tier = kept.rollups.tiers[0]

    def reported(scope: str) -> dict[str, list[int]]:
        wanted = parse_scope(scope)
        found = list(sums(kept.members, kept.rollups, wanted, tier, (at(0), at(SPAN_MS))))
        answer = history(found, wanted, tier.window_ns, at(1000))
        return {**dataclasses.asdict(answer.gpu_ns), "gpus": answer.gpus}

    for group in kept.occupancy().groups:
        whole, parts = reported(group.scope), [reported(f"worker:{rank}") for rank in group.ranks]
        assert whole == {
            name: [sum(each) for each in zip(*(part[name] for part in parts), strict=True)] for name in whole
        }


@given(ranks)
def test_dummy_steps_are_otherwise_idle_time_and_change_no_other_phase(ranks: list[tuple]) -> None:
    batches = [batch_of(*each) for each in enumerate(ranks)]
    cluster = Kept(batches).occupancy()
    claimed = [{*taken(batch)} for batch in batches]
    for worker, batch, others in zip(cluster.workers, batches, claimed, strict=True):
        ran = {ms for span in batch.dummy_steps.spans for ms in span_ms(span)}
        assert worker.dummy_gpu_ns == len(ran - others) * MS * worker.gpus
        assert worker.dummy_gpu_ns <= worker.gpu_ns.idle
    assert cluster.dummy_gpu_ns == sum(worker.dummy_gpu_ns for worker in cluster.workers)
    assert cluster.dummy_gpu_ns == sum(pool.dummy_gpu_ns for pool in cluster.pools)
    for batch in batches:
        batch.ClearField("dummy_steps")
    without = Kept(batches).occupancy()
    assert [worker.gpu_ns for worker in without.workers] == [worker.gpu_ns for worker in cluster.workers]
    assert without.dummy_gpu_ns == 0


def taken(batch: StepBatch) -> list[int]:
    """Return the milliseconds in which a step ran or KV was awaited."""
    starts, ends = (memoryview(column).cast("Q") for column in (batch.steps.start_unix_ns, batch.steps.end_unix_ns))
    ran = [Interval(start_unix_ns=start, end_unix_ns=end) for start, end in zip(starts, ends, strict=True)]
    return [ms for span in (*ran, *batch.kv_waits) for ms in span_ms(span)]


def span_ms(span: Interval) -> range:
    return range((span.start_unix_ns - at(0)) // MS, (span.end_unix_ns - at(0)) // MS)
