"""Test that a bounded map keeps its most recently set keys, each with its last value."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from libs.policy.newest import put_newest


@given(st.lists(st.tuples(st.integers(0, 6), st.integers())), st.integers(1, 4))
def test_the_most_recently_set_keys_stay_in_the_order_in_which_they_were_set(
    puts: list[tuple[int, int]], most: int
) -> None:
    kept: OrderedDict[int, int] = OrderedDict()
    for key, value in puts:
        put_newest(kept, key, value, most)
    last_first = dict.fromkeys(key for key, _ in reversed(puts))
    newest = list(last_first)[:most]
    assert list(kept.items()) == [(key, dict(puts)[key]) for key in reversed(newest)]
