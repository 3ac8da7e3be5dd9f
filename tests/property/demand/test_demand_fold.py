"""Properties of demand in time bins under lost, repeated and reordered records."""

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.demand.counts import NOTHING, Counts, DemandKey
from libs.demand.wire import Deltas, DemandFold, Mark

BIN_NS = 60_000_000_000
KEYS = [DemandKey("m", "online", "acme"), DemandKey("m", "online", "other"), DemandKey("n", "batch", "acme")]
BEGAN_NS = 1_000_000_000_000_000_000


@st.composite
def gateway_records(draw: st.DrawFn) -> list[Mark]:
    """Draw growing totals at increasing times."""
    steps = draw(st.lists(st.integers(1, 400_000_000_000), min_size=1, max_size=20))
    at_ns, rows, records = BEGAN_NS, dict[DemandKey, Counts](), list[Mark]()
    for step_ns in steps:
        at_ns += step_ns
        for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
            more = Counts(*draw(st.lists(st.integers(0, 1000), min_size=7, max_size=7)))
            rows[key] = rows.get(key, NOTHING).plus(more)
        records.append(Mark(at_ns, dict(rows)))
    return records


def folded(records: list[Mark], gateway: str = "g") -> Deltas:
    fold = DemandFold(BIN_NS)
    for each in records:
        fold.take((gateway, BEGAN_NS), each)
    return fold.take_deltas()


def totals(deltas: Deltas) -> dict[DemandKey, Counts]:
    found: dict[DemandKey, Counts] = {}
    for delta in deltas.values():
        for key, counts in delta.rows.items():
            found[key] = found.get(key, NOTHING).plus(counts)
    return found


@given(gateway_records(), st.data())
def test_bins_depend_on_which_records_came_and_not_on_their_order_or_number(
    records: list[Mark], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations([*records, *data.draw(st.lists(st.sampled_from(records), max_size=5))]))
    assert folded(shuffled) == folded(records)


@given(gateway_records(), st.data())
def test_totals_are_exact_whichever_records_are_lost_if_the_last_one_arrives(
    records: list[Mark], data: st.DataObject
) -> None:
    kept = [each for each in records[:-1] if data.draw(st.booleans())]
    found = totals(folded([*kept, records[-1]]))
    assert found == {key: counts for key, counts in records[-1].rows.items() if any(counts)}


@given(gateway_records())
def test_no_bin_is_negative_and_all_lie_between_the_first_and_the_last_record(records: list[Mark]) -> None:
    for number, delta in folded(records).items():
        assert BEGAN_NS // BIN_NS <= number <= records[-1].at_ns // BIN_NS
        assert 0 <= delta.covered_ns <= BIN_NS
        assert all(each >= 0 for counts in delta.rows.values() for each in counts)


@given(gateway_records(), gateway_records(), st.integers(0, 19))
@settings(max_examples=50)
def test_a_fold_resumed_from_stored_marks_counts_every_record_exactly_once(
    records: list[Mark], others: list[Mark], cut: int
) -> None:
    first = DemandFold(BIN_NS)
    for each in records[:cut]:
        first.take(("g", BEGAN_NS), each)
    for each in others:
        first.take(("h", BEGAN_NS), each)
    kept, marks = first.take_deltas(), first.newest()
    second = DemandFold(BIN_NS, marks)
    for each in (*records, *others):  # the broker gives all of it again
        second.take(("g", BEGAN_NS), each) if each in records else second.take(("h", BEGAN_NS), each)
    found = totals(second.take_deltas())
    for key, counts in totals(kept).items():
        found[key] = found.get(key, NOTHING).plus(counts)
    wanted = dict[DemandKey, Counts]()
    for rows in (records[-1].rows, others[-1].rows):
        for key, counts in rows.items():
            wanted[key] = wanted.get(key, NOTHING).plus(counts)
    assert {k: c for k, c in found.items() if any(c)} == {k: c for k, c in wanted.items() if any(c)}


@given(gateway_records())
def test_the_next_write_makes_up_for_a_failed_one(records: list[Mark]) -> None:
    fold = DemandFold(BIN_NS)
    for each in records:
        fold.take(("g", BEGAN_NS), each)
        fold.add(fold.take_deltas())
    assert {n: d for n, d in fold.take_deltas().items() if d} == folded(records)
