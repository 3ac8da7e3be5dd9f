"""Tests of what the soak counts as growth."""

import pytest

from load.soak import Sample, Trend, trends

SECONDS = 90.0


def samples(*values: float, figure: str = "resident_mib") -> list[Sample]:
    """Return samples of one process, spread over the time."""
    return [Sample("gateway-1", figure, SECONDS * at / len(values), value) for at, value in enumerate(values)]


def test_growth_of_the_first_third_is_left_out() -> None:
    assert trends(samples(10, 50, 90, 100, 100, 100, 101, 101, 101), SECONDS) == [
        Trend("gateway-1", "resident_mib", 100, 101)
    ]


@pytest.mark.parametrize(
    ("figure", "before", "flat", "grown"),
    [("resident_mib", 100, 105, 106), ("descriptors", 40, 48, 49), ("latency_ms", 20, 70, 71)],
)
def test_only_growth_beyond_the_tolerance_is_not_flat(figure: str, before: float, flat: float, grown: float) -> None:
    assert Trend("gateway-1", figure, before, flat).flat
    assert not Trend("gateway-1", figure, before, grown).flat
    assert Trend("gateway-1", figure, grown, before).flat


def test_a_subject_that_is_unknown_in_a_third_is_not_compared() -> None:
    assert trends(samples(1, 1, 1)[:2], SECONDS) == []
