"""Properties of every decision about which worker holds which model."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.reserve.placing import DRAIN_S, LINES_WAIT_S, NEVER_S, PAY_BACK, SETTLE_S, place
from libs.policy.reserve.pool import PlacedModel, PoolDecision, PoolWorker, Why, WorkerStage
from libs.testing.examples import examples

NAMES = [f"m{number}" for number in range(8)]
seconds = st.floats(0.0, 60.0)


@st.composite
def models(draw: st.DrawFn) -> list[PlacedModel]:
    found = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        waiting = draw(st.sampled_from([0, 0, 1, 5]))
        load_s = draw(st.floats(0.1, 10.0))
        found.append(
            PlacedModel(
                name, load_s, load_s * draw(st.floats(0.05, 1.0)), waiting=waiting,
                waited_s=draw(seconds) if waiting else 0.0,
                in_flight=waiting + draw(st.sampled_from([0, 0, 3])),
                priority=draw(st.sampled_from([0, 0, 1])),
                least=draw(st.sampled_from([0, 0, 1, 2])),
                most=draw(st.sampled_from([1, 1, 2])),
                soon=draw(st.floats(0, 1)), worth=draw(st.floats(0, 3)), worth_ahead=draw(st.floats(0, 3)),
                blocked=draw(st.sampled_from([False, False, True])),
            )
        )  # fmt: skip
    return found


@st.composite
def pools(draw: st.DrawFn) -> list[PoolWorker]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        stage = draw(st.sampled_from(list(WorkerStage)))
        model = "" if stage is WorkerStage.EMPTY else draw(st.sampled_from(NAMES))
        kept = frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=3)))
        left_s = draw(seconds) if stage is WorkerStage.LOADING else 0.0
        found.append(PoolWorker(f"w{number}", stage, model, draw(seconds), left_s, kept - {model}, draw(st.booleans())))
    return found


def decide(known: list[PlacedModel], pool: list[PoolWorker]) -> PoolDecision:
    return place(known, pool, turn_s=10.0)


@settings(max_examples=examples(300))
@given(models(), pools())
def test_only_available_workers_get_orders_and_each_at_most_one(
    known: list[PlacedModel], pool: list[PoolWorker]
) -> None:
    orders = decide(known, pool).orders
    may = {each.id for each in pool if each.can_take and each.stage in (WorkerStage.EMPTY, WorkerStage.SERVING)}
    assert len({order.worker for order in orders}) == len(orders)
    assert {order.worker for order in orders} <= may


@settings(max_examples=examples(300))
@given(models(), pools())
def test_no_order_takes_a_model_below_its_reserved_number(known: list[PlacedModel], pool: list[PoolWorker]) -> None:
    held = Counter(each.model for each in pool if each.stage in (WorkerStage.LOADING, WorkerStage.SERVING))
    after = Counter(held)
    for order in decide(known, pool).orders:
        after[order.model] += 1
        after[order.evicts] -= 1
    for each in known:
        assert after[each.name] >= min(each.least, held[each.name])


@settings(max_examples=examples(300))
@given(models(), pools())
def test_a_busy_worker_loses_its_model_only_after_a_turn_that_pays_for_the_switch_back(
    known: list[PlacedModel], pool: list[PoolWorker]
) -> None:
    by_name, workers = {each.name: each for each in known}, {each.id: each for each in pool}
    for order in decide(known, pool).orders:
        model = by_name.get(order.evicts)
        if model is None or not model.is_busy:
            continue
        copies = sum(
            each.model == model.name and each.stage in (WorkerStage.LOADING, WorkerStage.SERVING) for each in pool
        )
        if copies <= model.most:
            assert order.why is Why.TURN
            assert workers[order.worker].since_s >= max(10.0, PAY_BACK * model.load_s)
            assert by_name[order.model].waiting and model.priority <= by_name[order.model].priority


@settings(max_examples=examples(300))
@given(models(), pools())
def test_a_waiting_model_gets_an_empty_worker_and_a_predicted_wait(
    known: list[PlacedModel], pool: list[PoolWorker]
) -> None:
    placed = decide(known, pool)
    taken = {order.worker for order in placed.orders}
    held = {each.model for each in pool if each.stage in (WorkerStage.LOADING, WorkerStage.SERVING)}
    served = held | {order.model for order in placed.orders}
    empty = [each for each in pool if each.stage is WorkerStage.EMPTY and each.can_take and each.id not in taken]
    if empty:
        assert all(each.name in served for each in known if each.waiting and not each.blocked)
    assert {each.name for each in known} <= placed.waits_s.keys()
    assert all(wait_s >= 0 for wait_s in placed.waits_s.values())


@settings(max_examples=examples(300))
@given(models(), pools())
def test_without_reserved_workers_each_model_has_its_turn(known: list[PlacedModel], pool: list[PoolWorker]) -> None:
    waits_s = decide([replace(each, least=0) for each in known], pool).waits_s
    assert all(wait_s < NEVER_S for wait_s in waits_s.values())


def test_while_the_only_worker_goes_to_one_model_the_next_waits_for_its_turn() -> None:
    first = PlacedModel("first", 3.0, 1.0, waiting=1, in_flight=1)
    placed = decide([first, PlacedModel("next", 2.0, 1.0)], [PoolWorker("w", WorkerStage.EMPTY)])
    assert [order.model for order in placed.orders] == ["first"]
    turn_s = PAY_BACK * first.load_s
    assert placed.waits_s == {"first": first.load_s, "next": first.load_s + turn_s + DRAIN_S + 2.0}


@settings(max_examples=examples(300))
@given(models(), pools())
def test_a_worker_that_has_just_loaded_its_model_keeps_it(known: list[PlacedModel], pool: list[PoolWorker]) -> None:
    names = {each.name for each in known}
    fresh = {
        each.id
        for each in pool
        if each.stage is WorkerStage.SERVING and each.since_s < SETTLE_S and each.model in names
    }
    assert not fresh & {order.worker for order in decide(known, pool).orders}


@st.composite
def with_lines(draw: st.DrawFn) -> list[PlacedModel]:
    """Draw models of which some are requested by batch jobs too, or by them alone."""
    return [
        replace(
            each, lines_waiting=draw(st.integers(0, each.waiting)), lines_in_flight=draw(st.integers(0, each.in_flight))
        )
        for each in draw(models())
    ]


@settings(max_examples=examples(300))
@given(with_lines(), pools())
def test_batch_lines_take_no_worker_that_people_wait_for(known: list[PlacedModel], pool: list[PoolWorker]) -> None:
    by_name = {each.name: each for each in known}
    placed = decide(known, pool)
    held = {each.model for each in pool if each.stage in (WorkerStage.LOADING, WorkerStage.SERVING)}
    served = held | {order.model for order in placed.orders}
    for order in placed.orders:
        wanted, evicted = by_name.get(order.model), by_name.get(order.evicts)
        if wanted is None or order.why not in (Why.REQUESTED, Why.TURN) or wanted.people_wait or not wanted.waiting:
            continue
        # Every person who could have had that worker has one, or gets one.
        if evicted is None:
            assert all(each.name in served or each.blocked for each in known if each.people_wait)
        elif evicted.is_busy and not evicted.runs_for_lines_alone:
            copies = sum(
                each.model == evicted.name and each.stage in (WorkerStage.LOADING, WorkerStage.SERVING) for each in pool
            )
            assert copies > evicted.most or wanted.waited_s >= LINES_WAIT_S


def test_people_take_a_worker_of_batch_lines_at_once_and_the_reverse_happens_only_after_long() -> None:
    lines = PlacedModel(
        "lines", 2.0, 1.0, waiting=3, waited_s=400.0, in_flight=3, priority=9, lines_waiting=3, lines_in_flight=3
    )
    people = PlacedModel("people", 2.0, 1.0, waiting=1, waited_s=0.1, in_flight=1)
    (order,) = place([lines, people], [PoolWorker("a", WorkerStage.EMPTY)], sleeps=False).orders
    assert order.model == "people"
    runs_lines = replace(lines, waiting=0, waited_s=0.0, lines_waiting=0)
    (order,) = place([runs_lines, people], [PoolWorker("a", WorkerStage.SERVING, "lines", 1.5)], turn_s=10.0).orders
    assert (order.model, order.why) == ("people", Why.TURN)
    runs_people = replace(people, waiting=0)
    held = [PoolWorker("a", WorkerStage.SERVING, "people", 100.0)]
    assert not place([lines, runs_people], held, sleeps=False).orders
    (order,) = place([replace(lines, waited_s=LINES_WAIT_S), runs_people], held, sleeps=False).orders
    assert order.model == "lines"


def test_a_model_goes_only_where_it_fits_and_to_the_smallest_such_worker() -> None:
    pool = [PoolWorker("a", WorkerStage.EMPTY, memory_bytes=80), PoolWorker("b", WorkerStage.EMPTY, memory_bytes=20)]
    for size, worker in ((10, "b"), (50, "a")):
        (order,) = place([PlacedModel("m", 1.0, 1.0, waiting=1, size_bytes=size)], pool).orders
        assert order.worker == worker
    placed = place([PlacedModel("m", 1.0, 1.0, waiting=1, size_bytes=90)], pool)
    assert not placed.orders and placed.waits_s["m"] >= 86_400


def test_the_worker_with_the_fewest_busy_neighbours_is_chosen_among_equals() -> None:
    pool = [
        PoolWorker("a", WorkerStage.EMPTY, gpu="0"),
        PoolWorker("b", WorkerStage.SERVING, "busy", 100.0, gpu="0"),
        PoolWorker("c", WorkerStage.EMPTY, gpu="1"),
        PoolWorker("d", WorkerStage.SERVING, "idle", 100.0, gpu="1"),
    ]
    known = [
        PlacedModel("busy", 1.0, 1.0, in_flight=1),
        PlacedModel("idle", 1.0, 1.0),
        PlacedModel("m", 1.0, 1.0, waiting=1),
    ]
    (order,) = place(known, pool, sleeps=False).orders
    assert order.worker == "c"
    both = place([*known, PlacedModel("n", 1.0, 1.0, waiting=1)], pool, sleeps=False).orders
    assert {each.worker for each in both} == {"a", "c"}
