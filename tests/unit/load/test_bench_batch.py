"""What the benches of batch jobs call missed."""

import argparse

import pytest

from load.batch import bench_batch, bench_batch_yield
from load.batch.bench_batch import LEAST_RATIO, PLAIN, TRANSACTIONS
from load.batch.bench_batch_yield import MOST_P99_RATIO

ANSWERED = {"alone": 9, "with batch": 9}


def test_what_is_just_as_aimed_at_is_not_missed() -> None:
    assert bench_batch.misses({PLAIN: LEAST_RATIO, TRANSACTIONS: 0.1}) == []
    assert bench_batch_yield.misses(MOST_P99_RATIO, ANSWERED) == []


@pytest.mark.parametrize("ratio", [LEAST_RATIO - 0.01, float("nan")])
def test_a_job_slower_than_aimed_at_is_missed(ratio: float) -> None:
    (missed,) = bench_batch.misses({PLAIN: ratio, TRANSACTIONS: 1.0})
    assert PLAIN in missed


@pytest.mark.parametrize("ratio", [MOST_P99_RATIO + 0.01, float("nan")])
def test_people_who_wait_longer_than_aimed_at_are_missed(ratio: float) -> None:
    (missed,) = bench_batch_yield.misses(ratio, ANSWERED)
    assert "p99" in missed


def test_people_who_were_not_answered_at_all_are_missed() -> None:
    (missed,) = bench_batch_yield.misses(0.0, {"alone": 9, "with batch": 0})
    assert "with batch" in missed


def test_the_bench_ends_with_what_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    def side(lines_per_s: float) -> bench_batch.Side:
        return bench_batch.Side([lines_per_s], [1.0])

    sides = {bench_batch.JOB: side(4.0), PLAIN: side(10.0), TRANSACTIONS: side(10.0)}
    options = argparse.Namespace(lines=1, in_flight=1)
    assert bench_batch._tell(sides, options) == 1
    assert "missed: batch job over plain loop: 0.40" in capsys.readouterr().err
