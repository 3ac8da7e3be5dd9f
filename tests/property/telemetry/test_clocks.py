"""Properties of clock offsets from arrival times of telemetry: accurate to path differences, and bounded."""

from hypothesis import given
from hypothesis import strategies as st

from libs.telemetry.nodes import BUCKET_NS, BUCKETS, Clocks

MS = 1_000_000
NOW = 1_700_000_000 * 10**9
TELLING_NS = 100 * MS

offsets = st.lists(st.integers(-5_000, 5_000), min_size=3, max_size=9)
ways = st.lists(st.integers(2, 400), min_size=60, max_size=60)


@given(offsets, st.data())
def test_offsets_are_accurate_to_the_difference_of_the_shortest_paths(offsets_ms, data):
    clocks, least = Clocks(), []
    for number, offset_ms in enumerate(offsets_ms):
        ways_ms = data.draw(ways)
        least.append(min(ways_ms))
        for index, way_ms in enumerate(ways_ms):
            stamped_ns = NOW + index * TELLING_NS
            clocks.note(f"node-{number}", stamped_ns + offset_ms * MS, stamped_ns + way_ms * MS)
    found = clocks.offsets_ns(NOW + 60 * TELLING_NS)
    spread_ms = max(least) - min(least)
    middle_ms = sorted(offsets_ms)[len(offsets_ms) // 2] if len(offsets_ms) % 2 else None
    for number, offset_ms in enumerate(offsets_ms):
        for other, other_ms in enumerate(offsets_ms):
            apart_ms = (found[f"node-{number}"] - found[f"node-{other}"]) / MS
            assert abs(apart_ms - (offset_ms - other_ms)) <= spread_ms
        if middle_ms is not None:
            assert abs(found[f"node-{number}"] / MS - (offset_ms - middle_ms)) <= 2 * spread_ms


def test_a_corrected_clock_is_believed_within_a_minute():
    clocks = Clocks()
    for second in range(120):
        at_ns = NOW + second * 10**9
        for node in ("a", "b", "c"):
            behind_ns = 900 * MS if node == "c" and second < 40 else 0
            clocks.note(node, at_ns - behind_ns, at_ns + 5 * MS)
        if second == 39:
            assert clocks.offsets_ns(at_ns) == {"a": 0, "b": 0, "c": -900 * MS}
    assert clocks.offsets_ns(NOW + 120 * 10**9) == {"a": 0, "b": 0, "c": 0}


def test_a_silent_node_is_forgotten_and_an_unknown_one_has_no_offset():
    clocks = Clocks()
    assert clocks.offsets_ns(NOW) == {}
    clocks.note("a", NOW, NOW + MS)
    assert clocks.offsets_ns(NOW + BUCKETS * BUCKET_NS) == {}
