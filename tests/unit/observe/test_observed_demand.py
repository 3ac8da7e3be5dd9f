"""Tests of demand of an observed fleet: what is counted, what is unknown, and when a bin is closed."""

import pytest

from libs.contracts.step_row import StepRow
from libs.demand.counts import Counts
from libs.demand.wire import BinDelta, Deltas
from libs.observe.demand import (
    GIVE_UP_NS,
    MAX_COUNT,
    MAX_MODELS,
    SETTLED_NS,
    FleetDemand,
    KnownWork,
    ServedWork,
    ServerCounter,
    StepCounter,
)
from libs.observe.vllm import VllmParser
from tests.observe_rig import FakeVllm, Load

S = 1_000_000_000
BIN_NS = 60 * S
BEGAN_NS = 28_333_335 * BIN_NS - 10 * S
FIRST = BEGAN_NS // BIN_NS + 1
MINUTE = ServedWork(60, 60, 60_000, 45_000, 6_000, 60)


def fleet(**models: str) -> FleetDemand:
    found = FleetDemand(BIN_NS, BEGAN_NS)
    found.expect(models, BEGAN_NS)
    return found


def run(found: FleetDemand, name: str, from_s: float, to_s: float, role: str = "mixed") -> None:
    """Enter a server's seconds from the start of the first bin on, a request in each."""
    low_ns = FIRST * BIN_NS + round(from_s * S)
    for at_ns in range(low_ns, FIRST * BIN_NS + round(to_s * S), S):
        found.enter(name, "m", role, KnownWork(at_ns, at_ns + S, MINUTE.part(1, 60)))


def deltas(found: FleetDemand, at_s: float) -> Deltas:
    return found.take_deltas(FIRST * BIN_NS + round(at_s * S) + SETTLED_NS)


def counts(delta: BinDelta, model: str = "m") -> Counts:
    return next((each for key, each in delta.rows.items() if key.model == model), Counts())


def test_a_complete_bin_counts_its_arrivals_and_none_is_closed_early() -> None:
    found = fleet(a="m", b="m")
    for name in ("a", "b"):
        run(found, name, -10, 61)
    assert deltas(found, 59) == {}
    (number, delta), *rest = deltas(found, 60).items()
    assert (number, rest, delta.covered_ns, delta.unknown) == (FIRST, [], BIN_NS, frozenset())
    assert counts(delta) == Counts(120, 120, 120_000, 30_000, 12_000, 120)
    assert deltas(found, 60) == {}


def test_bins_wait_for_an_absent_server_and_its_difference_is_spread_over_them() -> None:
    found = fleet(a="m", b="m")
    run(found, "a", -10, 200)
    run(found, "b", -10, 10)
    assert deltas(found, 190) == {}
    back = KnownWork(FIRST * BIN_NS + 10 * S, FIRST * BIN_NS + 190 * S, ServedWork(*(3 * each for each in MINUTE)))
    found.enter("b", "m", "mixed", back)
    closed = deltas(found, 190)
    assert list(closed) == [FIRST, FIRST + 1, FIRST + 2]
    assert [counts(each).requests for each in closed.values()] == [120, 120, 120]


def test_a_restart_makes_its_bins_unknown_instead_of_low() -> None:
    found = fleet(a="m")
    run(found, "a", -10, 30)
    run(found, "a", 75, 180)  # the counters began again while it was away, from 30 s to 75 s
    closed = deltas(found, 180)
    assert list(closed) == [FIRST + 2]
    assert counts(closed[FIRST + 2]).requests == 60


def test_a_second_lost_to_a_restart_is_made_up_for_by_the_rest_of_its_bin() -> None:
    found = fleet(a="m")
    run(found, "a", -10, 30)
    run(found, "a", 32, 61)
    (delta,) = deltas(found, 60).values()
    assert counts(delta).requests == 60


def test_a_model_whose_servers_do_not_answer_is_unknown_and_others_are_known() -> None:
    found = fleet(a="m", b="other")
    run(found, "a", -10, 61)
    assert deltas(found, 60) == {}
    late_s = GIVE_UP_NS / S
    run(found, "a", 61, late_s + 1)
    closed = deltas(found, late_s)
    assert len(closed) == GIVE_UP_NS // BIN_NS
    assert {each.unknown for each in closed.values()} == {frozenset({"other"})}
    assert counts(closed[FIRST]).requests == 60
    assert {key.model for each in closed.values() for key in each.rows} == {"m"}


def test_demand_of_too_many_models_is_not_stored_and_models_that_left_make_room() -> None:
    found, models = FleetDemand(BIN_NS, BEGAN_NS), list[int]()
    for minute in range(3):
        names = [f"{minute}-{number}" for number in range(MAX_MODELS + 10)]
        from_ns = FIRST * BIN_NS + minute * BIN_NS
        found.expect(dict(zip(names, names, strict=True)), from_ns)
        for name in names:
            found.enter(name, name, "mixed", KnownWork(from_ns, from_ns + BIN_NS, MINUTE))
        closed = deltas(found, 60 * (minute + 1)).values()
        assert not any(each.unknown for each in closed)
        models.append(sum(len(each.rows) for each in closed))
    assert models == [MAX_MODELS, 0, MAX_MODELS], "those of the first minute leave in the second"


def test_a_server_out_of_service_does_not_hide_the_demand_of_others_of_its_model() -> None:
    found = fleet(a="m", b="m")
    late_s = GIVE_UP_NS / S
    run(found, "b", -10, 0)
    run(found, "a", -10, late_s + 61)
    closed = deltas(found, late_s + 60)
    assert {counts(each).requests for each in closed.values()} == {60}
    assert not any(each.unknown for each in closed.values())


def test_a_server_that_leaves_the_list_is_no_longer_waited_for() -> None:
    found = fleet(a="m", b="m")
    run(found, "a", -10, 121)
    run(found, "b", -10, 30)
    found.expect({"a": "m"}, FIRST * BIN_NS + 35 * S)
    closed = deltas(found, 120)
    assert [counts(each).requests for each in closed.values()] == [90, 60]


def test_requests_of_a_pair_count_once_and_prompts_computed_elsewhere_are_not_cached() -> None:
    found = fleet(p="m", d="m")
    for at_s in range(-10, 61):
        at_ns = FIRST * BIN_NS + at_s * S
        found.enter("p", "m", "prefill", KnownWork(at_ns, at_ns + S, ServedWork(1, 1, 1_000, 750, 1, 1)))
        found.enter("d", "m", "decode", KnownWork(at_ns, at_ns + S, ServedWork(1, 1, 1_000, 0, 100, 1)))
    (delta,) = deltas(found, 60).values()
    assert counts(delta) == Counts(60, 60, 60_000, 15_000, 6_000, 60)


def test_prefill_servers_alone_count_their_own_requests() -> None:
    found = fleet(p="m")
    run(found, "p", -10, 61, "prefill")
    (delta,) = deltas(found, 60).values()
    assert counts(delta).requests == 60


def test_a_servers_counters_give_its_arrivals_including_waiting_ones() -> None:
    now = [1_000.0]
    fake, counter, parser = (
        FakeVllm(Load(decoding=8, prompts_per_s=4), now_s=lambda: now[0]),
        ServerCounter(),
        VllmParser(),
    )

    def scrape(seconds: float) -> KnownWork | None:
        now[0] += seconds
        return counter.take(parser.parse(fake.exposition().encode(), now[0]))

    assert scrape(1) is None
    found = scrape(5)
    assert found is not None
    assert (found.to_ns - found.from_ns, found.work.requests, found.work.prompt_tokens) == (5 * S, 20, 20_000)
    assert found.work == found.work._replace(known_requests=20, computed_tokens=20_000, ended=20)
    fake.set(Load(decoding=8, prompts_per_s=4, waiting=6))
    found = scrape(1)
    assert found is not None and found.work.requests == 10
    fake.restart()
    assert scrape(1) is None
    assert scrape(1) is not None


# A prompt of 5,000 tokens in three steps of 2,048 at most, then two whole ones.
CHUNKS = [(2_048, 1, 2_048), (2_048, 1, 4_096), (904, 1, 5_000), (300, 2, 300)]
# A prompt whose KV came from elsewhere, and ten tokens of its answer.
HANDED_OVER = [(1, 1, 4_000, 0), *[(0, 0, 0, 1)] * 10]


@pytest.mark.parametrize(
    ("role", "steps", "work"),
    [
        ("prefill", CHUNKS, ServedWork(3, 3, 5_300, 5_300, 3, 3)),
        ("decode", HANDED_OVER, ServedWork(1, 1, 4_000, 0, 11, 1)),
        ("mixed", [(500, 1, 500, 4)], ServedWork(1, 1, 500, 500, 5, 1)),
    ],
)
def test_steps_give_requests_and_tokens(role: str, steps: list[tuple[int, ...]], work: ServedWork) -> None:
    counter = StepCounter()
    for step in steps:
        counter.add(StepRow(1, 2, *step), role, 2_048)
    assert counter.take(0, S, running=0, waiting=0).work == work
    assert counter.take(S, 2 * S, running=0, waiting=0).work == ServedWork()


def test_steps_with_impossible_counts_add_no_more_than_the_bound() -> None:
    counter = StepCounter()
    counter.add(StepRow(1, 2, 2**64 - 1, 2**64 - 1, 2**64 - 1, 2**64 - 1), "mixed", 0)
    assert set(counter.take(0, S, running=0, waiting=0).work) == {MAX_COUNT}


def test_a_bin_of_a_long_gap_is_not_counted_twice() -> None:
    """A difference over more time than a server is waited for says nothing of single bins."""
    found = fleet(a="m")
    run(found, "a", -10, 0)
    found.enter("a", "m", "mixed", KnownWork(FIRST * BIN_NS, FIRST * BIN_NS + GIVE_UP_NS + S, MINUTE))
    assert all(not any(each.rows) for each in deltas(found, 2 * GIVE_UP_NS / S).values())
