"""Tests of stored demand across restarts."""

from pathlib import Path

import pytest

from libs.contracts.errors import StartupError
from libs.demand.counts import Counts, DemandKey
from libs.demand.history import REQUESTS
from libs.demand.wire import DemandFold, Mark
from services.metrics.demand.keeping import COARSE, COARSE_BINS, FINE, FINE_BINS, TIMES, DemandFile

MINUTE_NS = 60_000_000_000
BEGAN_NS = 28_333_335 * MINUTE_NS
KEY = DemandKey("m", "online", "acme")


def mark(minutes: float, requests: int) -> Mark:
    return Mark(BEGAN_NS + round(minutes * MINUTE_NS), {KEY: Counts(requests=requests)})


def written(file: DemandFile, fold: DemandFold) -> None:
    file.save(fold.take_deltas(), fold.newest())


def requests(file: DemandFile, tier: int = FINE) -> int:
    span = file.span(tier)
    return 0 if span is None else int(file.read(tier, *span, MINUTE_NS).sums()[:, REQUESTS].sum())


def test_a_restart_counts_no_arrival_twice_and_loses_none(tmp_path: Path) -> None:
    path = str(tmp_path / "demand")
    file = DemandFile(path, "local")
    fold = DemandFold(MINUTE_NS, file.marks())
    fold.take(("g", BEGAN_NS), mark(1.5, 10))
    written(file, fold)
    fold.take(("g", BEGAN_NS), mark(2.5, 30))  # comes, and is lost with the process
    file.close()
    file = DemandFile(path, "local")
    fold = DemandFold(MINUTE_NS, file.marks())
    for each in (mark(1.5, 10), mark(2.5, 30), mark(40, 100)):  # the broker says all of it again
        fold.take(("g", BEGAN_NS), each)
    written(file, fold)
    assert requests(file) == requests(file, COARSE) == 100


def test_coarse_bins_stay_the_sums_of_fine_ones_when_late_records_arrive() -> None:
    file, fold = DemandFile(":memory:", "local"), DemandFold(MINUTE_NS)
    for each in (mark(1, 5), mark(31, 65), mark(14, 40), mark(16, 50)):
        fold.take(("g", BEGAN_NS), each)
        written(file, fold)
    fine, coarse = file.read(FINE, *(file.span(FINE) or (0, 0)), MINUTE_NS), file.span(COARSE) or (0, 0)
    for number in range(*coarse):
        parts = fine.sums()[max(number * TIMES - fine.first, 0) : (number + 1) * TIMES - fine.first]
        assert file.read(COARSE, number, number + 1, MINUTE_NS).sums()[0].tolist() == parts.sum(axis=0).tolist()


def test_demand_older_than_a_month_is_only_in_coarse_bins_and_is_dropped_after_400_days() -> None:
    file = DemandFile(":memory:", "local")
    last = 28_800_000
    old, older = last - FINE_BINS - 5, last - COARSE_BINS * TIMES - 5 * TIMES
    file.fill({number: {KEY: Counts(requests=7)} for number in (older, old, last)})
    assert file.span(FINE) == (last, last + 1)
    assert requests(file, COARSE) == 14


def test_imported_history_does_not_replace_measured_demand() -> None:
    file, fold = DemandFile(":memory:", "local"), DemandFold(MINUTE_NS)
    fold.take(("g", BEGAN_NS), mark(1, 5))
    written(file, fold)
    number = BEGAN_NS // MINUTE_NS
    assert file.fill({number: {KEY: Counts(requests=9)}, number - 1: {KEY: Counts(requests=9)}}) == 1
    assert requests(file) == 14


def test_the_file_of_another_cluster_is_not_changed(tmp_path: Path) -> None:
    DemandFile(str(tmp_path / "demand"), "one").close()
    with pytest.raises(StartupError, match="cluster 'one'"):
        DemandFile(str(tmp_path / "demand"), "two")
