"""Properties of Retry-After: the queue over its measured rate of departure."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.queues import MAX_RETRY_AFTER_S, MEMORY_S, MIN_RETRY_AFTER_S, Outflow, retry_after_s

TOKENS = st.integers(0, 10**9)
RATES = st.floats(1e-6, 1e9)


@given(TOKENS, RATES)
def test_retry_after_is_the_drain_time_within_bounds(tokens: int, rate: float) -> None:
    found = retry_after_s(tokens, rate)
    assert MIN_RETRY_AFTER_S <= found <= MAX_RETRY_AFTER_S
    if MIN_RETRY_AFTER_S <= tokens / rate <= MAX_RETRY_AFTER_S:
        assert found == pytest.approx(tokens / rate)


@given(TOKENS, TOKENS, RATES, RATES)
def test_a_longer_queue_or_slower_workers_never_shorten_retry_after(a: int, b: int, x: float, y: float) -> None:
    few, many = sorted((a, b))
    slow, fast = sorted((x, y))
    assert retry_after_s(few, fast) <= retry_after_s(many, slow)


def test_an_unknown_rate_gives_the_minimum() -> None:
    assert retry_after_s(10**9, None) == MIN_RETRY_AFTER_S
    assert Outflow().per_s(10**18) is None


@given(st.floats(0.01, 1.0), st.integers(1, 10_000), st.integers(200, 400), st.integers(0, 10**12))
def test_a_steady_flow_is_measured_despite_idle_periods(period_s: float, tokens: int, count: int, idle_ns: int) -> None:
    outflow, now_ns = Outflow(), 10**18
    outflow.resume(now_ns)
    for number in range(count):
        now_ns += int(period_s * 1e9)
        outflow.left(tokens, now_ns)
        if number % 50 == 49:
            now_ns += idle_ns
            outflow.resume(now_ns)
    # Each arrival counts in full, the time before it on average half-forgotten by one period.
    assert outflow.per_s(now_ns) == pytest.approx(tokens / period_s, rel=0.01 + period_s / MEMORY_S)


@given(st.integers(1, 10**6), st.lists(st.floats(0, 100), max_size=10))
def test_the_rate_only_falls_while_nothing_leaves(tokens: int, waits_s: list[float]) -> None:
    outflow, now_ns = Outflow(), 10**18
    outflow.resume(now_ns)
    now_ns += 10**9
    outflow.left(tokens, now_ns)
    rates = [outflow.per_s(now_ns)]
    for wait_s in waits_s:
        now_ns += int(wait_s * 1e9)
        rates.append(outflow.per_s(now_ns))
    known = [rate or 0.0 for rate in rates]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(known))
