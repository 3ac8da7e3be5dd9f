"""Tests of planners' knowledge of workers from several metrics services, in any order."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load, Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.telemetry.fleet_loads import COLUMNS, IMAGE_COLUMNS, WINDOW_NS
from libs.testing.workers.telemetry import MS, Telling, at, step, step_batch
from services.planner.fleet_view import (
    COVERED,
    DECODE,
    PREFILL,
    FleetView,
    MessageOutcome,
    WorkerColumns,
    observed_workers,
)

WINDOW_MS = 1_000


def registered(name: str, incarnation: int = 1, epoch: int = 1) -> Worker:
    return Worker(id=name, incarnation=incarnation, assignment=Assignment(model="m", role=1, epoch=epoch))


def view_of(*workers: Worker) -> FleetView:
    view = FleetView(WINDOW_MS * MS, 0)
    view.take_roster(WorkerColumns(workers, "planner"))
    return view


def loads(name: str, busy_ms: float, *, to_ms: int = WINDOW_MS, metrics_id: str = "m", **load: int) -> FleetLoads:
    batch = step_batch(
        to_ms, (to_ms - WINDOW_MS, to_ms), [step(to_ms - WINDOW_MS, to_ms - WINDOW_MS + busy_ms, prefill=1)],
        worker=name, load=Load(**load),
    )  # fmt: skip
    return Telling(metrics_id).loads([batch], at(to_ms))


def test_windows_and_loads_equal_those_that_workers_reported() -> None:
    view = view_of(registered("a"), registered("b"))
    assert view.take(loads("b", 250, running=7), at(WINDOW_MS)) is MessageOutcome.COUNTED
    assert view.times_ns(at(WINDOW_MS)).tolist() == [[0, 0, 0], [1_000 * MS, 250 * MS, 0]]
    assert (view.load(0), view.load(1).running) == (None, 7)  # type: ignore[union-attr]
    assert view.is_known().tolist() == [False, True]


def test_waits_for_a_cpu_equal_those_reported_and_are_unknown_from_older_services() -> None:
    telling, view = Telling(), view_of(registered("a"), registered("b"))
    batches = [step_batch(1, (0, 1_000), worker=name) for name in ("a", "b")]
    batches[0].sched_delay_ns = 1_000 * MS
    message = telling.loads(batches, at(WINDOW_MS))
    older = FleetLoads.FromString(message.SerializeToString())
    older.ClearField("cpu_waits")
    assert view.take(older, at(WINDOW_MS)) is MessageOutcome.COUNTED
    assert [each.cpu_wait for each in observed_workers(view, at(WINDOW_MS))] == [None, None]
    view = view_of(registered("a"), registered("b"))
    assert view.take(message, at(WINDOW_MS)) is MessageOutcome.COUNTED
    assert [each.cpu_wait for each in observed_workers(view, at(WINDOW_MS))] == [0.918, None]


def test_the_fuller_of_two_accounts_of_a_window_counts_in_either_order() -> None:
    whole, part = loads("a", 500), loads("a", 500)
    for window in part.windows:
        for name in ("covered_ns", "prefill_ns"):
            setattr(window, name, bytes(8))
    for order in ((whole, part), (part, whole)):
        view = view_of(registered("a"))
        for number, each in enumerate(order):
            each.metrics_id = f"metrics-{number}"
            view.take(each, at(WINDOW_MS))
        assert view.times_ns(at(WINDOW_MS))[0, [COVERED, PREFILL, DECODE]].tolist() == [1_000 * MS, 500 * MS, 0]


def test_a_late_account_does_not_describe_the_present() -> None:
    view = view_of(registered("a"))
    view.take(loads("a", 10, to_ms=2_000, running=5), at(2_000))
    received_ns = view.received_ns.tolist()
    view.take(loads("a", 10, to_ms=1_000, running=9), at(2_100))
    assert (view.load(0).running, view.received_ns.tolist()) == (5, received_ns)  # type: ignore[union-attr]


def test_another_incarnation_of_a_worker_is_not_mistaken_for_this_one() -> None:
    view = view_of(registered("a", incarnation=2))
    view.take(loads("a", 500), at(WINDOW_MS))
    assert not view.is_known().any() and not view.times_ns(at(WINDOW_MS)).any()


def test_knowledge_of_a_worker_survives_a_new_list_of_workers_but_not_its_restart() -> None:
    view = view_of(registered("a"), registered("b"))
    view.take(loads("b", 250, running=7), at(WINDOW_MS))
    view.take_roster(WorkerColumns([registered("c"), registered("b", epoch=4)], "planner"))
    assert view.times_ns(at(WINDOW_MS))[1].tolist() == [1_000 * MS, 250 * MS, 0]
    assert (view.load(1).running, view.epoch(1)) == (7, 4)  # type: ignore[union-attr]
    view.take_roster(WorkerColumns([registered("b", incarnation=2)], "planner"))
    assert not view.is_known().any() and not view.times_ns(at(WINDOW_MS)).any()


def test_invalid_accounts_are_counted_and_change_nothing() -> None:
    view = view_of(registered("a"))
    short, odd, beyond, old = (loads("a", 500) for _ in range(4))
    short.running = b"1234"
    odd.windows[0].start_unix_ns += 1
    beyond.windows[0].workers = (7).to_bytes(8, "little")
    old.told_unix_ns -= 60 * 10**9
    taken = [view.take(each, at(WINDOW_MS)) for each in (short, odd, beyond, old)]
    assert taken == [MessageOutcome.MALFORMED] * 3 + [MessageOutcome.OLD]
    assert not view.is_known().any()
    assert view.take(FleetLoads(told_unix_ns=at(WINDOW_MS)), at(WINDOW_MS)) is MessageOutcome.COUNTED


def test_every_column_has_an_entry_for_each_worker() -> None:
    reported = loads("a", 100)
    assert all(len(getattr(reported, name)) == 8 for name in COLUMNS if name not in IMAGE_COLUMNS)
    # Without vision models, the columns of images are zeros.
    assert not any(getattr(reported, name) for name in IMAGE_COLUMNS)
    encoding = loads("a", 100, images_used=1, image_encode_ns=MS, waiting_encode_ns=MS)
    assert all(len(getattr(encoding, name)) == 8 for name in COLUMNS)
    assert {window.start_unix_ns % WINDOW_NS for window in reported.windows} == {0}
