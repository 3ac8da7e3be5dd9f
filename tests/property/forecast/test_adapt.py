"""Test that widths of bands adapt equally in blocks of origins and one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.forecast.bands import LEVELS, adapt_in_blocks, adapt_singly


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
