"""Properties of forecasts and trends of stored demand."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.classes import BATCH_CLASS
from libs.demand.counts import DemandKey
from libs.demand.history import FIELDS, DemandBins, demand_history, mean_outputs
from libs.demand.report import BANDS, forecast_report, model_demand
from libs.policy.capacity import WorkerKind
from libs.policy.forecast.history import SERIES
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

BIN_NS = 900_000_000_000
KIND = WorkerKind(Speed(StepTimeModel(5e6, 27_000, 0.66, 7e6, 20_000, 52, 0.3), 2048), 1, 256, 400_000)


@st.composite
def kept(draw: st.DrawFn) -> DemandBins:
    """Draw bins with gaps, bursts, zeros, and models that start and stop."""
    count = draw(st.integers(0, 120))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    received = rng.random(count) < draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    rows = {}
    for tenant in draw(st.lists(st.sampled_from(["acme", "beta", "other"]), unique=True)):
        rate = draw(st.sampled_from([0.0, 0.2, 5.0, 1000.0]))
        requests = rng.poisson(rate, count)
        begin, end = sorted(draw(st.lists(st.integers(0, count), min_size=2, max_size=2)))
        requests[: begin if draw(st.booleans()) else 0] = 0
        requests[end if draw(st.booleans()) else count :] = 0
        known = rng.binomial(requests, draw(st.sampled_from([0.1, 1.0])))
        ended = rng.binomial(known, draw(st.sampled_from([0.0, 0.9, 1.0])))
        row = np.zeros((count, FIELDS), np.int64)
        row.T[:] = requests, known, known * 300, known * 100, ended * 50 + known, ended, requests - known
        rows[DemandKey("m", "online", tenant)] = row
    return DemandBins(BIN_NS, 1_900_000, received, rows)


@given(kept())
@settings(max_examples=60, deadline=None)
def test_a_forecast_has_sorted_finite_bands_or_gives_the_reason_for_none(
    bins: DemandBins,
) -> None:
    found = forecast_report(model_demand(bins, "m"), KIND, horizon_s=43_200, tpot_s=0.05)
    for name in SERIES:
        bands: list[Any] = [found["series"][name][band] for band, _ in BANDS]
        values = np.array(bands, dtype=np.float64)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (np.diff(values, axis=0) >= 0).all()
    if not bins.covered.any() or not any(row.any() for row in bins.rows.values()):
        assert found["notes"]


@given(kept(), st.integers(0, 120))
@settings(max_examples=60, deadline=None)
def test_later_demand_changes_no_earlier_history(bins: DemandBins, cut: int) -> None:
    cut, counts = min(cut, len(bins)), bins.sums()
    at = {"start_s": 0.0, "step_s": 900.0, "seconds": 900.0}
    whole, part = demand_history(counts, bins.covered, **at), demand_history(counts[:cut], bins.covered[:cut], **at)
    for name in SERIES:
        assert np.array_equal(whole.series(name)[:cut], part.series(name)[:cut], equal_nan=True) or not cut


@given(st.integers(1, 200), st.integers(0, 2**31))
def test_unfinished_answers_do_not_shorten_the_mean_output(mean: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.zeros((200, FIELDS), np.int64)
    counts[:, 4] = 100 * mean  # tokens made of many that run
    counts[:, 5] = rng.poisson(100, 200)  # as many end as begin
    assert np.all(mean_outputs(counts)[20:] >= 0.6 * mean)


def test_batch_lines_do_not_count_as_interactive_demand() -> None:
    row = np.ones((40, FIELDS), np.int64)
    bins = DemandBins(BIN_NS, 0, np.ones(40, np.bool_), {DemandKey("m", BATCH_CLASS, "acme"): row})
    assert model_demand(bins, "m").history.requests.sum() == 0


def test_a_tenant_with_growing_answers_is_named_as_the_cause_of_a_decode_heavy_balance() -> None:
    rng, count, turn = np.random.default_rng(3), 800, 600
    rows = {}
    for tenant, outputs in (("acme", (240, 610)), ("beta", (200, 200))):
        requests = rng.poisson(900, count)
        length = np.where(np.arange(count) < turn, *outputs)
        row = np.zeros((count, FIELDS), np.int64)
        row.T[:] = requests, requests, requests * 500, 0 * requests, requests * length, requests, 0 * requests
        rows[DemandKey("m", "online", tenant)] = row
    bins = DemandBins(60_000_000_000, 1000, np.ones(count, np.bool_), rows)
    found = forecast_report(model_demand(bins, "m"), KIND, horizon_s=3600, tpot_s=0.05)
    balance = next(each for each in found["trend"] if each["what"] == "balance")
    assert balance["after"] < balance["before"]
    assert abs(balance["since_unix_s"] - (1000 + turn) * 60) <= 180
    first = balance["causes"][0]
    assert (first["tenant"], first["what"]) == ("acme", "outputs")
    assert 220 < first["before"] < 260
    assert 590 < first["after"] < 630
