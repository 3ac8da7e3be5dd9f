import asyncio
import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute, Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import DummySteps, Interval
from libs.telemetry.columns import prefill_shares
from libs.telemetry.directory import LEFT_NS, LISTED_NS
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import History
from libs.telemetry.rollups import MAX_WORKERS, RollUps
from libs.telemetry.timeline import BatchOutcome
from libs.telemetry.workers import LOAD_NS, Members
from libs.testing.workers.telemetry import MS, at, step, step_batch, write_windows
from services.metrics.accounting.occupancy import cluster_occupancy, cluster_occupancy_in_turns, efficiency
from services.metrics.accounting.series import MIN_WINDOW_NS, parse_scope, parse_window_ns


class ReportedFleet:
    """The telemetry of workers, written as windows of the first `ms`."""

    def __init__(self, *batches, ms=2000):
        self.fleet, self.rollups, self.members = fleet_of(*batches), RollUps(), Members()
        self._history = History(self.fleet, self.rollups, self.members)
        write_windows(self._history, 0, ms)

    def occupancy(self, end_ms, window_ms=1000):
        return cluster_occupancy(self.fleet, self.rollups, self.members, at(end_ms), window_ms * MS)


def fleet_of(*batches):
    fleet = FleetTelemetry(prefill_shares)
    for batch in batches:
        fleet.add(batch, batch.covered_to_unix_ns)
    return fleet


def test_figures_of_the_cluster_are_weighted_by_gpus():
    reported = ReportedFleet(
        step_batch(1, (0, 1000), [step(0, 800, prefill=8)], worker="prefill-0", role="prefill", gpus=4),
        step_batch(1, (0, 1000), [step(0, 400, decode=1)], worker="decode-0", gpus=1),
    )
    cluster = reported.occupancy(1000)
    assert (cluster.gpus, cluster.coverage) == (5, 1.0)
    assert cluster.prefill == pytest.approx(3.2 / 5)
    assert cluster.decode == pytest.approx(0.4 / 5)
    assert cluster.ratio == pytest.approx(8.0)
    assert [worker.id for worker in cluster.workers] == ["decode-0", "prefill-0"]


async def test_a_group_is_the_sum_of_its_ranks_even_if_dummy_steps_are_reported_midway():
    def rank(number, sequence, cover_ms, *dummies_ms):
        batch = step_batch(sequence, cover_ms, worker=f"w-{number}")
        batch.group = "g"
        spans = [Interval(start_unix_ns=at(start), end_unix_ns=at(end)) for start, end in dummies_ms]
        batch.dummy_steps.CopyFrom(DummySteps(steps=sequence, spans=spans))
        return batch

    reported = ReportedFleet(*(rank(number, 1, (0, 1100), (200, 300)) for number in range(2)))

    async def late():
        for number in range(2):
            batch = rank(number, 2, (1100, 1200), (900, 950))
            reported.fleet.add(batch, batch.covered_to_unix_ns)

    requested = cluster_occupancy_in_turns(reported.fleet, reported.rollups, reported.members, at(1000), 1000 * MS)
    found, _ = await asyncio.gather(requested, late())
    assert [worker.dummy_gpu_ns for worker in found.workers] == [100 * MS, 100 * MS]
    assert [found.groups[0].dummy_gpu_ns, found.dummy_gpu_ns, found.pools[0].dummy_gpu_ns] == [200 * MS] * 3
    assert reported.occupancy(1000).dummy_gpu_ns == 300 * MS


def encoding(start_ms, end_ms):
    return step(start_ms, end_ms)._replace(prefill_sequences=2, encoded_images=2)


@pytest.mark.parametrize("batch_ms", [100, 500])
def test_encoding_images_is_a_part_of_prefill_that_adds_up_over_workers_and_pools(batch_ms):
    """This holds for batches added together, and for batches sorted in one by one."""
    steps = [encoding(0, 30), step(30, 80, prefill=64), step(80, 90, decode=4)]
    seeing = [
        step_batch(
            number,
            (low, low + batch_ms),
            [each._replace(start_unix_ns=each.start_unix_ns + low * MS, end_unix_ns=each.end_unix_ns + low * MS)
             for each in steps],
            worker="prefill-0", role="prefill", gpus=2,
        )
        for number, low in enumerate(range(0, 2000, batch_ms))
    ]  # fmt: skip
    beside = step_batch(1, (0, 2000), [step(0, 400, decode=1)], worker="decode-0")
    reported = ReportedFleet(*seeing, beside)
    found, times = reported.occupancy(1000), 1000 // batch_ms
    decode, prefill = found.workers
    assert prefill.gpu_ns.prefill == 2 * 80 * times * MS
    assert prefill.gpu_ns.decode == 2 * 10 * times * MS
    assert [prefill.encode_gpu_ns, found.encode_gpu_ns] == [2 * 30 * times * MS] * 2
    assert prefill.encode == pytest.approx(0.03 * times)
    assert {pool.role: pool.encode_gpu_ns for pool in found.pools} == {"decode": 0, "prefill": found.encode_gpu_ns}
    assert (decode.encode, decode.encode_gpu_ns) == (0.0, 0)


def test_encoding_longer_than_its_batches_counts_once_it_has_ended():
    whole = encoding(50, 250)
    announced = whole._replace(end_unix_ns=0)
    batches = [step_batch(number, (low, low + 100), steps, worker="w")
               for number, low, steps in ((1, 0, [announced]), (2, 100, []), (3, 200, [whole]))]  # fmt: skip
    assert fleet_of(*batches[:2]).encode_ns("w", at(0), at(200)) == 0
    fleet = fleet_of(*batches)
    assert fleet.encode_ns("w", at(0), at(300)) == 200 * MS == fleet.phases("w", at(0), at(300)).prefill_ns


@given(st.lists(st.tuples(st.sampled_from(["encode", "prefill", "idle"]), st.integers(1, 90)), max_size=20), st.data())
def test_encoding_adds_up_over_parts_of_a_window(pieces, data):
    steps, now_ms, kinds = [], 0, []
    for kind, length_ms in pieces:
        end_ms = now_ms + length_ms
        if kind != "idle":
            steps.append(encoding(now_ms, end_ms) if kind == "encode" else step(now_ms, end_ms, prefill=7))
        kinds += [kind] * length_ms
        now_ms = end_ms
    fleet = fleet_of(step_batch(1, (0, 2000), steps, worker="w"))
    low, middle, high = sorted(data.draw(st.lists(st.integers(0, 2000), min_size=3, max_size=3)))
    whole = fleet.encode_ns("w", at(low), at(high))
    assert whole == kinds[low:high].count("encode") * MS
    assert whole == fleet.encode_ns("w", at(low), at(middle)) + fleet.encode_ns("w", at(middle), at(high))
    assert whole <= fleet.phases("w", at(low), at(high)).prefill_ns


def test_pools_nodes_and_models_each_add_up_to_the_cluster():
    batches = [
        step_batch(1, (0, 1000), [step(0, 100 * number, decode=1)], worker=f"w-{number}", role=role, gpus=number)
        for number, role in enumerate(("prefill", "decode", "decode", "mixed"), start=1)
    ]
    batches[3].node = "node-b"
    batches[0].assignment.model = "other"
    cluster = ReportedFleet(*batches).occupancy(1000)
    assert [(pool.role, pool.gpus) for pool in cluster.pools] == [("decode", 5), ("mixed", 4), ("prefill", 1)]
    assert [(node.node, node.gpus, node.clock_offset_ms) for node in cluster.nodes] == [
        ("node-a", 6, 0), ("node-b", 4, 0),
    ]  # fmt: skip
    for parts in (cluster.workers, cluster.pools, cluster.nodes, cluster.models):
        for field in dataclasses.asdict(cluster.gpu_ns):
            assert sum(getattr(part.gpu_ns, field) for part in parts) == getattr(cluster.gpu_ns, field)


def test_starvation_is_a_part_of_idle_and_follows_the_role_of_that_time():
    starving = step_batch(1, (0, 1000), [step(0, 400, decode=1)], worker="decode-0", gpus=3)
    starving.starved.append(Interval(start_unix_ns=at(500), end_unix_ns=at(700)))
    busy = step_batch(1, (0, 1000), [step(0, 800, prefill=8)], worker="prefill-0", role="prefill", gpus=1)
    cluster = ReportedFleet(starving, busy).occupancy(1000)
    assert [each.starved for each in cluster.workers] == [pytest.approx(0.2), 0]
    assert {each.role: each.starved for each in cluster.pools} == {"decode": pytest.approx(0.2), "prefill": 0}
    assert cluster.starved == pytest.approx(0.2 * 3 / 4)
    assert cluster.prefill + cluster.decode + cluster.kv_wait + cluster.idle == pytest.approx(1)
    assert all(each.starved <= each.idle for each in (cluster, *cluster.workers, *cluster.pools))


def test_utilisation_covers_only_time_in_a_phase_and_is_null_without_reports():
    compute = Compute(
        layer_parameters=1_000_000, head_parameters=0, parameter_bytes=2, peak_flops_per_s=1e12, peak_bytes_per_s=1e9
    )
    reported = step_batch(1, (0, 1000), [step(0, 8, prefill=1000), step(10, 30, decode=4)], worker="a", gpus=2)
    reported.compute.CopyFrom(compute)
    silent = step_batch(1, (0, 1000), [step(0, 8, prefill=1000)], worker="b")
    known, unknown = ReportedFleet(reported, silent).occupancy(1000).workers
    assert known.utilisation.prefill.mfu == pytest.approx(2 * 1_000_000 * 1000 / (1e12 * 0.016))
    assert known.utilisation.decode.mfu == pytest.approx(2 * 1_000_000 * 4 / (1e12 * 0.040))
    assert known.utilisation.decode.mbu == pytest.approx(2_000_000 / (1e9 * 0.040))
    assert unknown.utilisation is None
    later = ReportedFleet(reported).occupancy(900, 100).workers[0].utilisation
    assert (later.prefill.mfu, later.decode.mbu) == (None, None)


def test_efficiency_of_a_scope_is_the_mean_over_its_time_in_the_phase():
    compute = Compute(layer_parameters=1_000_000, parameter_bytes=2, peak_flops_per_s=1e12, peak_bytes_per_s=1e9)
    batches = [
        step_batch(1, (0, 1000), [step(0, 10, decode=4), step(20, 60, decode=4)], worker="a", gpus=2),
        step_batch(1, (0, 1000), [step(0, 10, decode=4)], worker="b"),
        step_batch(1, (0, 1000), [step(0, 10, decode=4)], worker="untold"),
    ]
    for batch in batches[:2]:
        batch.compute.CopyFrom(compute)
    cluster = ReportedFleet(*batches).occupancy(1000)
    a, b = (worker.utilisation.decode.mbu for worker in cluster.workers[:2])
    whole = efficiency(cluster, parse_scope("cluster"))
    assert whole.utilisation.decode.mbu == pytest.approx((a * 100 + b * 10) / 110)
    assert (whole.utilisation.prefill.mfu, whole.tensor_active) == (None, None)
    assert efficiency(cluster, parse_scope("worker:b")).utilisation.decode.mbu == b
    assert efficiency(cluster, parse_scope("worker:untold")).utilisation.decode.mbu is None
    assert whole.clock_offset_ms == {"node-a": 0}


def test_a_pool_counts_the_time_that_workers_had_its_role():
    compute = Compute(layer_parameters=1_000_000, parameter_bytes=2, peak_flops_per_s=1e12, peak_bytes_per_s=1e9)
    batches = [
        step_batch(1, (0, 700), [step(0, 300, prefill=500)], worker="mover", role="prefill", gpus=2),
        step_batch(2, (700, 2000), [step(700, 900, decode=4), step(1500, 1900, decode=4)], worker="mover", gpus=2),
        step_batch(1, (0, 2000), [step(0, 1000, decode=4)], worker="stayer"),
    ]
    for batch in batches:
        batch.compute.CopyFrom(compute)
    reported = ReportedFleet(*batches)
    across, before, after = reported.occupancy(1000), reported.occupancy(700, 500), reported.occupancy(2000, 500)

    def pools(cluster):
        return {
            pool.role: (pool.gpus, pool.gpu_ns.covered, pool.gpu_ns.prefill, pool.gpu_ns.decode)
            for pool in cluster.pools
        }

    assert pools(across) == {
        "prefill": (2, 1400 * MS, 600 * MS, 0),
        "decode": (3, 1600 * MS, 0, 1400 * MS),
    }
    assert [pool.coverage for pool in across.pools] == [1, 1]
    assert pools(before) == {"prefill": (2, 1000 * MS, 200 * MS, 0), "decode": (1, 500 * MS, 0, 500 * MS)}
    assert pools(after) == {"decode": (3, 1500 * MS, 0, 800 * MS)}
    assert [(worker.id, worker.role) for worker in before.workers] == [("mover", "prefill"), ("stayer", "decode")]
    assert [part.role for part in across.workers[0].by_role] == ["decode", "prefill"]
    assert across.workers[1].by_role == after.workers[0].by_role == []

    in_prefill = efficiency(across, parse_scope("pool:prefill")).utilisation
    assert in_prefill.prefill.mfu == across.workers[0].utilisation.prefill.mfu > 0
    assert in_prefill.decode.mbu is None  # it decoded in the other pool
    in_decode = efficiency(across, parse_scope("pool:decode")).utilisation
    assert (in_decode.prefill.mfu, in_decode.decode) == (
        None,
        efficiency(across, parse_scope("cluster")).utilisation.decode,
    )


def test_the_ratio_is_null_if_nothing_was_decoded():
    reported = ReportedFleet(step_batch(1, (0, 1000), [step(0, 800, prefill=8)], worker="prefill-0", role="prefill"))
    assert reported.occupancy(1000).ratio is None


def test_a_silent_worker_lowers_coverage_and_not_the_fractions():
    reported = ReportedFleet(
        step_batch(1, (0, 1000), [step(0, 500, decode=1)], worker="silent", gpus=8),
        step_batch(1, (1000, 2000), [step(1000, 1250, decode=1)], worker="heard", gpus=1),
    )
    cluster = reported.occupancy(2000)
    received, silent = cluster.workers
    assert (silent.coverage, silent.prefill, silent.decode, silent.kv_wait, silent.idle, silent.ratio) == (
        0,
        *[None] * 5,
    )
    assert (cluster.gpus, cluster.coverage, cluster.decode) == (9, pytest.approx(1 / 9), 0.25)
    assert received.decode == 0.25


def test_a_worker_that_left_cleanly_no_longer_lowers_coverage():
    last = step_batch(1, (0, 1000), [step(0, 500, decode=1)], worker="left", gpus=8)
    last.last = True
    reported = ReportedFleet(last, step_batch(1, (0, 2000), [step(1000, 1250, decode=1)], worker="heard"))
    cluster = reported.occupancy(2000)
    assert (cluster.gpus, cluster.coverage, [worker.id for worker in cluster.workers]) == (1, 1.0, ["heard"])
    across = reported.occupancy(1500)
    assert (across.gpus, across.coverage, across.gpu_ns.covered) == (9, 1.0, (8 * 500 + 1000) * MS)


def test_an_old_window_is_read_from_the_coarser_windows_that_remain():
    reported = ReportedFleet(step_batch(1, (0, 300_000), [step(0, 1500, decode=1)]), ms=300_000)
    old = reported.occupancy(2500, 2000)
    assert (old.window_ms, old.as_of_unix_ns, old.coverage, old.gpu_ns.decode) == (2000, at(2000), 1.0, 1500 * MS)


def test_lost_telemetry_lowers_coverage_and_not_the_known_fractions():
    reported = ReportedFleet(step_batch(1, (0, 500), [step(0, 500, decode=1)]))
    (worker,) = reported.occupancy(1000).workers
    assert (worker.coverage, worker.decode, worker.idle) == (0.5, 1.0, 0.0)


def test_models_are_summed_separately():
    reported = ReportedFleet(
        step_batch(1, (0, 1000), [step(0, 100, decode=1)], worker="a", model="small"),
        step_batch(1, (0, 1000), [step(0, 300, decode=1)], worker="b", model="large", gpus=2),
        step_batch(1, (0, 1000), [step(0, 600, decode=1)], worker="c", model="large", gpus=1),
    )
    cluster = reported.occupancy(1000)
    assert [(model.model, model.gpus, model.decode) for model in cluster.models] == [
        ("large", 3, pytest.approx(0.4)),
        ("small", 1, pytest.approx(0.1)),
    ]


def test_queue_depths_role_and_model_are_those_of_the_newest_batch():
    busy = Load(running=3, waiting=2, waiting_prefill_tokens=700)
    reported = ReportedFleet(
        step_batch(2, (100, 200), role="mixed", load=busy), step_batch(1, (0, 100), load=Load(running=9))
    )
    (worker,) = reported.occupancy(200, 200).workers
    assert (worker.role, worker.running, worker.waiting, worker.waiting_prefill_tokens) == ("mixed", 3, 2, 700)


def test_without_data_there_are_no_gpus_and_no_fractions():
    cluster = ReportedFleet().occupancy(0)
    assert (cluster.gpus, cluster.coverage, cluster.idle, cluster.workers, cluster.models) == (0, 0, None, [], [])


def test_a_silent_worker_is_listed_for_a_while():
    fleet = fleet_of(step_batch(1, (0, 100)))
    other = step_batch(1, (0, LISTED_NS / MS + 200), worker="other")
    fleet.add(other, other.covered_to_unix_ns)
    last = at(100)
    assert [facts.worker_id for facts in fleet.directory.listed(last + LISTED_NS - 1)] == ["decode-0", "other"]
    assert [facts.worker_id for facts in fleet.directory.listed(last + LISTED_NS)] == ["other"]


def test_no_worker_is_given_up_while_all_are_silent():
    fleet = fleet_of(step_batch(1, (0, 100)))
    assert [facts.worker_id for facts in fleet.directory.listed(at(100) + 10 * LISTED_NS)] == ["decode-0"]


def test_a_worker_that_left_cleanly_is_soon_forgotten():
    last = step_batch(1, (0, 100))
    last.last = True
    assert list(fleet_of(last).directory.listed(at(100) + LEFT_NS)) == []


def test_the_queue_of_a_worker_that_stays_silent_is_discarded():
    fleet = fleet_of(step_batch(1, (0, 100), load=Load(running=3, waiting=2, kv_pulls=1)))
    (received,) = fleet.directory.listed(at(100) + LOAD_NS - 1)
    (silent,) = fleet.directory.listed(at(100) + LOAD_NS)
    assert (received.load.waiting, silent.load) == (2, Load())


def test_counters_of_a_silent_worker_do_not_decrease():
    counted = Load(preemptions=3, recomputed_tokens=70, pool_faults=1, refused_kv_pulls=2)
    (silent,) = fleet_of(step_batch(1, (0, 100), load=counted)).directory.listed(at(100) + LOAD_NS)
    assert silent.load == counted


def test_workers_are_bounded_and_the_longest_silent_is_dropped_first():
    batches = [step_batch(1, (index, index + 1), worker=f"worker-{index}") for index in range(MAX_WORKERS + 1)]
    fleet = fleet_of(*batches)
    listed = {facts.worker_id for facts in fleet.directory.listed(at(MAX_WORKERS))}
    assert len(listed) == MAX_WORKERS
    assert "worker-0" not in listed


def test_a_batch_from_a_clock_far_ahead_is_refused_and_does_not_drop_history():
    fleet = fleet_of(step_batch(1, (0, 100)))
    assert fleet.add(step_batch(2, (100, 10_000_000)), at(200)) is BatchOutcome.MALFORMED
    assert fleet.phases("decode-0", at(0), at(100)).covered_ns == 100 * MS


gpu_counts = st.integers(1, 8)
worker_layouts = st.lists(
    st.tuples(gpu_counts, st.integers(0, 1000), st.integers(0, 500), st.integers(0, 500), st.booleans()), max_size=6
)


@settings(deadline=None)
@given(worker_layouts, st.integers(100, 1500))
def test_fractions_add_up_to_one_and_gpu_time_adds_up_exactly_at_every_level(layouts, window_ms):
    batches = []
    for index, (gpus, start, prefill_ms, decode_ms, lost) in enumerate(layouts):
        middle, end = start + prefill_ms, start + prefill_ms + decode_ms
        steps = [step(start, middle, prefill=7), step(middle, end, prefill=3, decode=2)]
        batch = step_batch(1, (0, start if lost else 2000), steps, worker=f"w{index}", gpus=gpus, model=f"m{index % 2}")
        batches.append(batch)
    cluster = ReportedFleet(*batches).occupancy(2000, window_ms)
    for scope in (cluster, *cluster.models, *cluster.workers):
        parts = dataclasses.asdict(scope.gpu_ns)
        covered = parts.pop("covered")
        assert sum(parts.values()) == covered
        assert min(parts.values()) >= 0
        assert 0 <= scope.coverage <= 1
        if covered:
            assert abs(scope.prefill + scope.decode + scope.kv_wait + scope.idle - 1) < 1e-9
        else:
            assert (scope.prefill, scope.decode, scope.kv_wait, scope.idle, scope.ratio) == (None,) * 5
    for field in dataclasses.fields(cluster.gpu_ns):
        for scopes in (cluster.workers, cluster.models, cluster.pools):
            total = getattr(cluster.gpu_ns, field.name)
            assert sum(getattr(scope.gpu_ns, field.name) for scope in scopes) == total
    assert cluster.gpus == sum(worker.gpus for worker in cluster.workers)


@pytest.mark.parametrize(
    ("text", "ms"), [("2s", 2000), ("500ms", 500), ("1m", 60_000), ("0.5s", 500), ("10m", 600_000)]
)
def test_windows_are_parsed_in_common_spellings(text, ms):
    assert parse_window_ns(text) == ms * MS


@pytest.mark.parametrize(
    "text", ["", "2", "s", "-2s", "2 s", "99ms", "601s", "11m", "1e3s", "2h", "nan s", "٢s", "9" * 99]
)
def test_an_invalid_window_is_refused_with_the_allowed_values(text):
    with pytest.raises(InvalidRequest, match="from 100ms to 10m") as refused:
        parse_window_ns(text)
    assert refused.value.param == "window"


@given(st.text(max_size=12))
def test_any_text_is_a_window_within_bounds_or_refused(text):
    with contextlib.suppress(InvalidRequest):
        assert MIN_WINDOW_NS <= parse_window_ns(text) <= 600_000 * MS
