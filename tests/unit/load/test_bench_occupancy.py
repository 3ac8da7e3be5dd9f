"""Tests of the aims that the occupancy bench reports as missed."""

import dataclasses

import pytest

from load.metrics.bench_occupancy import AIMED_GPUS, Measured, misses

GOOD = Measured(
    gpus=AIMED_GPUS, instances=1, full=False, cpu_share=1.0, rss_mb=500, fresh_p50_ms=150, fresh_p99_ms=200,
    tick_kb=45, late_ms=0, skipped_ticks=0, unrevised_windows=0,
)  # fmt: skip
SMOOTH = {"frames_per_s_median": 30.0, "longest_task_ms": 200.0}


def test_a_figure_exactly_at_its_aim_is_not_missed():
    assert misses([GOOD, dataclasses.replace(GOOD, full=True)], SMOOTH) == misses([], None) == []


@pytest.mark.parametrize(
    ("worse", "named"),
    [({"fresh_p99_ms": 201}, "freshness"), ({"cpu_share": 1.1}, "cores"), ({"rss_mb": 501}, "RSS"),
     ({"fresh_p99_ms": float("nan")}, "freshness")],
)  # fmt: skip
def test_each_aim_applies_to_the_fleet_that_it_is_for(worse, named):
    fleet = dataclasses.replace(GOOD, **worse)
    (missed,) = misses([fleet], SMOOTH)
    assert named in missed
    assert misses([dataclasses.replace(fleet, gpus=3 * AIMED_GPUS)], SMOOTH) == []
    assert misses([dataclasses.replace(fleet, instances=2)], SMOOTH) == []
    (missed,) = misses([dataclasses.replace(fleet, full=True)], None)
    assert "all history kept" in missed


@pytest.mark.parametrize("worse", [{"frames_per_s_median": 29.0}, {"longest_task_ms": 201.0}])
def test_a_page_that_stutters_or_hangs_misses_its_aim(worse):
    assert len(misses([GOOD], SMOOTH | worse)) == 1
