"""Tests of the rates at which bench-policy-live tries live suites, and of the highest rate it finds."""

import pytest

from load.planner.bench_policy_live import highest, in_turns, near, sides


@pytest.mark.parametrize(
    ("good", "requested"),
    [
        ({5: 1.0, 7: 0.95, 9: 0.5, 11: 0.4}, [7, 9]),
        ({5: 0.8, 7: 0.5}, [5, 7]),  # no rate keeps it: the edge is below
        ({5: 1.0, 7: 0.99, 9: 0.97}, [7, 9]),  # all do: it is above
        ({5: 1.0, 7: 0.5, 9: 0.95}, [5, 7]),  # the first that fails, whatever lies beyond
    ],
)
def test_live_suites_are_tried_around_the_labs_edge(good: dict[float, float], requested: list[float]) -> None:
    assert near(good) == requested


def test_the_edge_lies_between_the_last_rate_that_met_the_slo_and_the_first_that_did_not() -> None:
    assert highest({7: 1.0, 9: 0.8}) == (8.0, True)
    assert highest({7: 1.0, 9: 1.0}) == (9, False)


def test_each_side_is_tried_at_its_own_rates_and_they_alternate() -> None:
    before, ours = sides(16)
    turns = in_turns((before, ours), {"before": [5, 7], "ours": [9, 11, 13]})
    assert [(side.name, rate) for side, rate in turns] == [
        ("before", 5), ("ours", 9), ("ours", 11), ("before", 7), ("ours", 13),
    ]  # fmt: skip
