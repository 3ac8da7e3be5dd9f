"""Bands adapt alike in blocks of origins and one by one, and follow errors that grow for good."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.forecast.bands import (
    LEVELS,
    adapt_in_blocks,
    adapt_singly,
    follow_bands,
    reaching,
    warm_bands,
)
from libs.policy.forecast.history import Floats


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(0, 30), st.integers(0, 80), st.sampled_from([0.1, 3.0]))
def test_bands_are_the_same_in_blocks_and_one_by_one(
    seed: int, horizon: int, lead: int, count: int, spread: float
) -> None:
    """Unknown outcomes, missing bands and widths at their limit are among the draws."""
    rng = np.random.default_rng(seed)
    before = int(rng.integers(0, 40))
    offsets = np.sort(rng.normal(0, 1, (count, len(LEVELS))), axis=1)
    pending = np.sort(rng.normal(0, 1, (min(lead, horizon), len(LEVELS))), axis=1)
    pending[rng.random(len(pending)) < 0.2] = np.nan
    came = rng.normal(0, spread, count)
    came[rng.random(count) < 0.1] = np.nan
    series = (rng.normal(0, 0.1, count), came, rng.integers(0, 2, before + count))
    width = rng.uniform(-0.7, 0.7, (2, len(LEVELS)))
    width[:, LEVELS.index(0.5)] = 0.0
    found = [adapt(width, (pending, offsets), series, horizon) for adapt in (adapt_in_blocks, adapt_singly)]
    for block, single in zip(*found, strict=True):
        assert np.allclose(np.reshape(block, -1), np.reshape(single, -1), rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 12))
def test_levels_are_reached_at_the_places_of_a_plain_search(seed: int, count: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    anchors = np.sort(rng.integers(0, 40, rows))
    known_from = np.append(rng.integers(0, 60, count), -1)
    errors, prior = np.append(rng.integers(0, 9, count), 0) / 8.0, np.append(rng.integers(0, 3, count), 1) / 4.0
    own, share = rng.random(rows), rng.uniform(0.05, 1, rows)
    found = reaching(known_from, (errors, prior), anchors, (own, share))
    for row, anchor in enumerate(anchors):
        summed = np.cumsum(own[row] * errors * (known_from <= anchor) + share[row] * prior)
        for place, level in zip(found[row], LEVELS, strict=True):
            wanted = level * summed[-1]
            assert summed[place] >= wanted - 1e-8
            assert place == 0 or summed[place - 1] < wanted


def _widths(errors: Floats, horizons: tuple[int, ...], fitted: int) -> Floats:
    """Return the logarithmic width of 90 % bands around a forecast of 0, from the fit's last origin on."""
    point, scale = np.zeros((len(horizons), len(errors))), np.ones((len(horizons), len(errors)))
    state = warm_bands(point[:, :fitted], errors[:fitted], scale[:, :fitted], horizons, 600.0)
    found = follow_bands(state, point, errors, scale, horizons, step_s=600.0, fitted=fitted)
    return np.asarray(found[:, :, -1] - found[:, :, 0])


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**31), st.floats(4, 6))
def test_bands_follow_errors_that_grow_for_good_within_half_a_day(seed: int, factor: float) -> None:
    """Half a day ahead no such error is known by then, so it shows by nearer horizons alone."""
    rng = np.random.default_rng(seed)
    grown = []
    for _ in range(8):
        errors = rng.normal(0, 0.1, 8 * 144)
        larger = np.where(np.arange(len(errors)) >= 7 * 144, factor, 1.0) * errors
        before, after = (_widths(each, (6, 72), 7 * 144) for each in (errors, larger))
        grown.append(np.log(after[72] / before[72]))
    hour, half_day = np.mean(grown, axis=0) / np.log(factor)
    assert 0.68 < hour < 1.1
    assert 0.53 < half_day < 1.1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 0.5))
def test_errors_of_one_size_have_bands_that_stay(seed: int, size: float) -> None:
    errors = size * np.random.default_rng(seed).choice([-1.0, 1.0], 4 * 144)
    widths = _widths(errors, (1, 6), 3 * 144)
    assert np.abs(np.log(widths / widths[0])).max() < 0.5
