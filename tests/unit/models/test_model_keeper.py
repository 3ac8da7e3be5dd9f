"""Tests of the planner's model keeper over the registry, the catalogue and gateways' use."""

from dataclasses import replace
from typing import Any

import msgspec

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_ASLEEP,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    HeldModel,
    ModelMove,
    PoolWorker,
    Worker,
)
from libs.stores.catalogue import Catalogued, LoadTimes, ModelEntry, ModelUse, Reservation
from services.planner.models.api import catalogue_answer
from services.planner.models.keeper import Call, Knobs, ModelKeeper, devices

GB, SECOND = 1_000_000_000, 1_000_000_000
NOON = 1_700_000_000 * SECOND // (86_400 * SECOND) * 86_400 * SECOND + 43_200 * SECOND


def pool_worker(
    name: str, model: str = "", *, loading: bool = False, epoch: int = 1, at: int = NOON, **pool: Any
) -> Worker:
    state = WORKER_STATE_LOADING if loading else WORKER_STATE_READY if model else WORKER_STATE_ASLEEP
    worker = Worker(id=name, incarnation=epoch, state=state, address="h:1")
    worker.assignment.model, worker.assignment.epoch = model, epoch
    reported = {
        "since_unix_ns": at - 100 * SECOND, "memory_bytes": 80 * GB, "load_bytes_per_s": 4e9, "wake_bytes_per_s": 16e9,
        "overhead_s": 0.5,
    } | pool  # fmt: skip
    worker.pool.CopyFrom(PoolWorker(address="h:2", **reported))
    return worker


def keeper_of(*entries: ModelEntry, workers: list[Worker], **knobs: Any) -> ModelKeeper:
    keeper = ModelKeeper(replace(Knobs(), **knobs))
    keeper.take_catalogue(Catalogued({each.name: each for each in entries}))
    keeper.take_workers(workers, NOON)
    return keeper


def orders_of(keeper: ModelKeeper, now_ns: int, **models: ModelUse) -> list[tuple[str, str]]:
    keeper.take_uses({"g": models}, now_ns)
    return [(call.worker.id, call.order.model) for call in keeper.decide(now_ns)]


def model(name: str, size_gb: float = 16, **fields: Any) -> ModelEntry:
    return ModelEntry(name, "builtin:sim", round(size_gb * GB), **fields)


WAITS = ModelUse(1, 1, 1, NOON // 1_000_000, 1)


def test_a_requested_model_is_loaded_once_and_its_wait_is_reported() -> None:
    keeper = keeper_of(model("a"), model("b"), workers=[pool_worker("w")])
    assert keeper.outlooks(NOON)["a"].state == "disk"
    assert orders_of(keeper, NOON, a=WAITS) == [("w", "a")]
    assert orders_of(keeper, NOON + SECOND // 4, a=WAITS) == []
    reported = keeper.outlooks(NOON)
    assert reported["a"].state == "loading" and 4_500 <= reported["a"].ready_unix_ms - NOON // 1_000_000 <= 5_000
    assert reported["b"].wait_s > reported["a"].wait_s


def test_a_call_that_reached_no_worker_is_repeated() -> None:
    keeper = keeper_of(model("a"), workers=[pool_worker("w")])
    keeper.take_uses({"g": {"a": WAITS}}, NOON)
    (call,) = keeper.decide(NOON)
    keeper.done(call, reached=False)
    assert [each.order.model for each in keeper.decide(NOON + SECOND // 4)] == ["a"]


def test_a_worker_that_dies_while_it_loads_leaves_the_model_to_another() -> None:
    keeper = keeper_of(model("a"), workers=[pool_worker("v"), pool_worker("w")])
    ((first, _),) = orders_of(keeper, NOON, a=WAITS)
    other = "w" if first == "v" else "v"
    keeper.take_workers([pool_worker(first, "a", loading=True, epoch=2), pool_worker(other)], NOON)
    assert orders_of(keeper, NOON + SECOND, a=WAITS) == []
    keeper.take_workers([pool_worker(other)], NOON + 2 * SECOND)
    assert orders_of(keeper, NOON + 2 * SECOND, a=WAITS) == [(other, "a")]


def test_load_times_are_those_that_workers_measured() -> None:
    keeper = keeper_of(model("a"), workers=[])
    moved = pool_worker("w", "a", last=ModelMove(model="a", took_ns=7 * SECOND, unix_ns=NOON))
    assert keeper.take_workers([moved], NOON) == {"a": LoadTimes(load_s=7.0)}
    assert keeper.take_workers([moved], NOON) == {}
    assert keeper.load_s(keeper.found.entries["a"]) == 7.0
    woken = pool_worker("w", "a", last=ModelMove(model="a", from_host=True, took_ns=SECOND, unix_ns=NOON + 1))
    assert keeper.take_workers([woken], NOON) == {"a": LoadTimes(7.0, 1.0)}


def test_a_model_that_failed_to_load_is_reported_and_retried_at_growing_intervals() -> None:
    keeper = keeper_of(model("a"), workers=[pool_worker("w")])
    at, tried = NOON, []
    for number in range(3):
        assert orders_of(keeper, at, a=WAITS) == [("w", "a")]
        tried.append(at)
        last = ModelMove(model="a", error="no such folder", unix_ns=at + 1)
        keeper.take_workers([pool_worker("w", epoch=number + 2, last=last)], at)
        assert keeper.outlooks(at)["a"].error == "no such folder"
        assert keeper.outlooks(at)["a"].state == "failed"
        while not keeper.decide(at) and at < NOON + 100 * SECOND:
            at += SECOND // 4
        keeper.done(Call(keeper.workers[0], number + 2, keeper.placed.orders[0], None), reached=False)
    assert tried[2] - tried[1] > tried[1] - tried[0]
    keeper.take_catalogue(Catalogued({"a": model("a", priority=1)}))
    assert keeper.outlooks(at)["a"].error == ""


def test_a_model_larger_than_any_worker_is_not_tried() -> None:
    keeper = keeper_of(model("a", 141), workers=[pool_worker("w")])
    assert orders_of(keeper, NOON, a=WAITS) == []
    assert "141.0 GB of weights, no worker more than 80.0 GB" in keeper.outlooks(NOON)["a"].error


def test_a_reserved_model_is_loaded_before_the_reservation_begins_and_stays_until_it_ends() -> None:
    entry = model("a", reservations=(Reservation(1, 12 * 60 + 1, 13 * 60),))
    for seconds, wanted in ((0, []), (50, [("w", "a")])):
        keeper = keeper_of(entry, workers=[pool_worker("w")])
        assert orders_of(keeper, NOON + seconds * SECOND) == wanted
    holding = keeper_of(entry, model("b"), workers=[pool_worker("w", "a")])
    assert orders_of(holding, NOON + 120 * SECOND, b=WAITS) == []
    after = keeper_of(entry, model("b"), workers=[pool_worker("w", "a")])
    assert orders_of(after, NOON + 3_600 * SECOND, b=WAITS) == [("w", "b")]


def test_a_model_whose_client_has_a_retry_after_is_loaded_and_stays_until_then() -> None:
    promised = ModelUse(1, 1, promised_unix_ms=NOON // 1_000_000 + 30_000)
    keeper = keeper_of(model("a"), model("b"), workers=[pool_worker("w")])
    assert orders_of(keeper, NOON, a=promised) == [("w", "a")]
    held = pool_worker("w", "a", epoch=2, since_unix_ns=NOON + 5 * SECOND)
    keeper.take_workers([held], NOON + 5 * SECOND)
    assert orders_of(keeper, NOON + 10 * SECOND, a=promised, b=WAITS) == []


def test_a_removed_model_loses_its_worker() -> None:
    keeper = keeper_of(model("b"), workers=[pool_worker("w", "a")])
    assert orders_of(keeper, NOON) == [("w", "")]


def test_a_sleeping_model_wakes_where_it_sleeps() -> None:
    asleep = [HeldModel(model="a", size_bytes=16 * GB)]
    keeper = keeper_of(model("a"), workers=[pool_worker("v"), pool_worker("w", asleep=asleep)])
    assert keeper.outlooks(NOON)["a"].state == "asleep"
    assert orders_of(keeper, NOON, a=WAITS) == [("w", "a")]


def test_counts_of_gateways_are_summed_and_a_restarted_gateway_does_not_reduce_them() -> None:
    keeper = keeper_of(model("a"), workers=[])
    keeper.take_uses({"g": {"a": ModelUse(5, 1, in_flight=1)}, "h": {"a": ModelUse(2, 1, in_flight=2)}}, NOON)
    assert keeper.uses.in_flight("a") == 3
    keeper.take_uses({"g": {"a": ModelUse(1, 2)}}, NOON + SECOND)
    assert keeper.uses.in_flight("a") == 0 and keeper.uses.last_use_ms("a") == 2


def test_workers_of_one_gpu_count_as_one_gpu_and_models_go_where_neighbours_are_idle() -> None:
    workers = [pool_worker("a0", "busy"), pool_worker("a1"), pool_worker("b0", "idle"), pool_worker("b1")]
    for each in workers:
        each.node, each.gpu_share = "n", 0.5
        each.gpu_uuids.append(f"GPU-{each.id[0]}")
    alone = pool_worker("c0", memory_bytes=10 * GB)
    keeper = keeper_of(model("busy"), model("idle"), model("m"), workers=[*workers, alone], sleeps=False)
    assert (len(keeper.workers), devices(keeper.workers)) == (5, 3)
    runs = ModelUse(3, 1, 0, 0, 3)
    assert orders_of(keeper, NOON, busy=runs, m=WAITS) == [("b1", "m")]


def test_batch_lines_of_one_model_wait_behind_people_of_another() -> None:
    lines = ModelUse(9, 1, 9, (NOON - 60 * SECOND) // 1_000_000, 9, lines_waiting=9, lines_in_flight=9)
    keeper = keeper_of(model("a", priority=5), model("b"), workers=[pool_worker("w")])
    assert orders_of(keeper, NOON, a=lines, b=WAITS) == [("w", "b")]


def test_an_adapter_needs_no_worker_and_its_use_is_counted_separately() -> None:
    sql = ModelEntry("sql", "/adapters/sql", 0, parent="a")
    keeper = keeper_of(model("a"), model("b"), sql, workers=[pool_worker("v"), pool_worker("w")], window_s=10.0)
    waits = msgspec.structs.replace(WAITS, arrivals=3, in_flight=3)
    ((worker, held),) = orders_of(keeper, NOON, a=waits, sql=ModelUse(2, NOON // 1_000_000, in_flight=2))
    assert held == "a"
    assert keeper.outlooks(NOON)["sql"].state == "loading"
    keeper.take_workers([pool_worker(worker, "a", epoch=2)], NOON)
    assert keeper.outlooks(NOON)["sql"] == keeper.outlooks(NOON)["a"]
    assert (keeper.alone("a")[0], keeper.alone("sql")[0]) == (1, 2)
    for second in range(1, 40):  # one request in two seconds, by the adapter's name alone
        now, count = NOON + second * SECOND, 3 + second // 2
        use = ModelUse(count, now // 1_000_000)
        orders_of(keeper, now, a=use, sql=use)
    shown = catalogue_answer(keeper, now)
    listed = {each.name: each for each in shown.models}
    assert listed["sql"].parent == "a" and listed["sql"].workers == listed["a"].workers == [worker]
    assert listed["sql"].next_use_s is not None and listed["sql"].next_use_s < 30
    within = shown.adapters_asked_within["600"]
    assert within is not None and within.expected > 0.9
    assert shown.at_once is not None and shown.at_once.p99 <= 2, "two models, whatever adapters they have"


def test_an_adapter_of_a_model_outside_the_pool_is_ready_at_once() -> None:
    keeper = keeper_of(ModelEntry("sql", "/adapters/sql", 0, parent="settings"), workers=[])
    assert keeper.decide(NOON) == [] and keeper.outlooks(NOON)["sql"].state == "serving"
