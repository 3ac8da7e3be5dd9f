"""Properties of KV wait and starvation: exact, disjoint, and never during a step."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.kv_blocks import KvWait

changes = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from(["awaiting", "stepping"]), st.booleans(), st.booleans()), max_size=30
)


@given(changes)
def test_every_nanosecond_of_awaiting_kv_without_a_step_is_exactly_one_of_the_two(reported):
    wait, now = KvWait(), 1
    awaiting = ready = stepping = False
    waited = starved = 0
    for later, what, value, is_ready in reported:
        if awaiting and not stepping:
            waited, starved = waited + later * ready, starved + later * (not ready)
        now += later
        if what == "stepping":
            stepping = value
            wait.stepping(value, now)
        else:
            awaiting, ready = value, is_ready
            wait.awaiting(value, now, ready=is_ready)
    wait.awaiting(False, now)
    spans, hungry = wait.take_ended(), wait.take_starved()
    assert sum(end - start for start, end in spans) == waited
    assert sum(end - start for start, end in hungry) == starved
    both = sorted(spans + hungry)
    assert all(start < end for start, end in both)
    assert all(before[1] <= after[0] for before, after in pairwise(both))
    assert (wait.since_ns, wait.starved_since_ns) == (0, 0)
