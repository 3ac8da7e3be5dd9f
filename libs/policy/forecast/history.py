"""Demand in time bins, with unknown bins marked, and running means of a series at many time scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
SeriesName = Literal["requests", "prefill", "decode"]
SERIES: Final[tuple[SeriesName, ...]] = ("requests", "prefill", "decode")
DAY_S: Final = 86_400.0
WEEK_S: Final = 604_800.0
# The least known share of a bin's requests for their tokens to stand for all of them.
MIN_KNOWN_SHARE: Final = 0.3
MOST_BINS: Final = 100_000
"""The maximum number of bins of a history; older ones are dropped."""
# Zeros in a series without earlier zeros count as an outage for this long, then as the end of demand.
OUTAGE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class DemandHistory:
    """Mean rates per bin, all series of the same length; nan marks unknown bins."""

    step_s: float
    start_s: float
    """The beginning of the first bin, by the clock of the data."""
    requests: Floats
    prefill: Floats
    """Prompt tokens per second of all requests."""
    decode: Floats
    """Output tokens per second of all requests."""
    notes: tuple[str, ...] = ()
    """Sentences about repaired or omitted data."""

    def __len__(self) -> int:
        return len(self.requests)

    def series(self, name: SeriesName) -> Floats:
        """Return the series of this name: requests, prefill or decode."""
        return {"requests": self.requests, "prefill": self.prefill, "decode": self.decode}[name]

    def before(self, bins: int) -> "DemandHistory":
        """Return the history cut to its first `bins` bins."""
        return DemandHistory(
            self.step_s, self.start_s, self.requests[:bins], self.prefill[:bins], self.decode[:bins], self.notes
        )


def history_from_rates(times_s: ArrayLike, rates: Mapping[str, ArrayLike], step_s: float = 0.0) -> DemandHistory:
    """Return bins on a regular grid from samples in the order in which they were taken.

    `rates` has "requests", "known_requests", "prefill" and "decode", each per second. Tokens are those of the known
    requests, scaled to all where at least `MIN_KNOWN_SHARE` is known. A `step_s` of 0 means the commonest step.

    Gaps become unknown bins. If the clock was set back, later samples replace earlier ones. Negative and infinite
    rates are unknown. Raise ValueError if lengths differ.
    """
    times = np.asarray(times_s, dtype=np.float64)
    columns = {name: np.asarray(rates[name], dtype=np.float64) for name in (*SERIES, "known_requests")}
    if any(len(column) != len(times) for column in columns.values()):
        raise ValueError("times and rates differ in length")
    finite = np.isfinite(times)
    times, columns = times[finite], {name: column[finite] for name, column in columns.items()}
    notes = [] if finite.all() else [f"{int((~finite).sum())} samples without a time are left out"]
    if not len(times):
        return DemandHistory(step_s or 600.0, 0.0, *(np.empty(0),) * 3, notes=(*notes, "no samples"))
    moved = np.diff(times)
    forward = moved[moved > 0]
    step = step_s or (float(_commonest(forward)) if len(forward) else 600.0)
    if (moved <= 0).any():
        notes.append(f"the clock was set back {int((moved <= 0).sum())} times: later samples replace earlier ones")
    indices = np.floor((times - times[0]) / step + 0.5 + 1e-6).astype(np.int64)
    first = max(int(indices.min()), int(indices.max()) - MOST_BINS + 1)
    indices -= first
    kept = indices >= 0
    if not kept.all():
        notes.append(f"samples older than {MOST_BINS} bins are left out")
    size = int(indices.max()) + 1
    grid = {name: np.full(size, np.nan) for name in columns}
    for name, column in columns.items():
        grid[name][indices[kept]] = np.where(np.isfinite(column) & (column >= 0), column, np.nan)[kept]
        if (column < 0).any():
            notes.append(f"{int((column < 0).sum())} rates of {name} are negative: they count as not known")
    unseen = size - len(np.unique(indices[kept]))
    if unseen:
        notes.append(f"{unseen} of {size} bins have no sample")
    tokens, masked = _of_all_requests(grid)
    if masked:
        notes.append(f"in {masked} of {size} bins under {MIN_KNOWN_SHARE:.0%} of the requests have known tokens")
    start_s = float(times[0]) + first * step
    return DemandHistory(step, start_s, grid["requests"], tokens["prefill"], tokens["decode"], tuple(notes))


def _commonest(steps: Floats) -> np.float64:
    values, counts = np.unique(steps, return_counts=True)
    return np.float64(values[counts.argmax()])


def _of_all_requests(grid: Mapping[str, Floats]) -> tuple[dict[str, Floats], int]:
    """Return tokens scaled from known to all requests, and the number of bins with too few known ones."""
    requests, known = grid["requests"], grid["known_requests"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        enough = (known > 0) & (known >= MIN_KNOWN_SHARE * requests)
        factor = np.where(enough, np.clip(requests / known, 1.0, 1 / MIN_KNOWN_SHARE), np.nan)
    factor[requests == 0] = 0.0  # without requests there are no tokens
    tokens = {name: np.where(factor == 0, 0.0, grid[name] * factor) for name in ("prefill", "decode")}
    return tokens, int((np.isfinite(requests) & ~np.isfinite(factor)).sum())


def without_outages(values: Floats, step_s: float) -> Floats:
    """Mark zeros after demand as unknown for up to `OUTAGE_S`; later zeros mean that demand ended.

    This applies only where zeros are rare among earlier bins, so sporadic demand keeps its zeros. Every bin depends
    on earlier ones only.
    """
    zero = values == 0
    if not zero.any():
        return values
    indices = np.arange(len(values))
    seen = np.cumsum(np.isfinite(values))
    zeros_before = np.cumsum(zero) - zero
    run_start = np.maximum.accumulate(np.where(zero, -1, indices))
    in_run = indices - run_start
    earlier_zeros = zeros_before - np.where(zero, in_run - 1, 0)
    rare = (earlier_zeros <= 0.02 * seen) & (seen - zeros_before > 12) & (run_start >= 0)
    return np.where(zero & rare & (in_run * step_s <= OUTAGE_S), np.nan, values)


_BLOCK: Final = 64


def hold(values: Floats) -> Floats:
    """Fill each unknown bin with the last known value, and leading ones with the first; all nan stays nan."""
    known = np.isfinite(values)
    if known.all() or not known.any():
        return values
    indices = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.asarray(np.where(indices >= 0, values[np.maximum(indices, 0)], values[known.argmax()]))


def running_means(values: Floats, half_lives: Floats) -> Floats:
    """Return exponentially weighted means of the bins up to each one, of shape [half-lives, n].

    Half-lives are in bins, and no bin may be unknown. Weights are normalised from the first bin on, so early means
    are plain ones.
    """
    keep = 0.5 ** (1 / half_lives)
    weights = (1 - keep[:, None] ** np.arange(1, len(values) + 1)) / (1 - keep[:, None])
    return np.asarray(_decayed_sums(values, keep) / weights)


def _decayed_sums(values: Floats, keep: Floats) -> Floats:
    """Return the sums over s <= t of keep^(t-s) * values[s], of shape [decays, n].

    They are computed in blocks, 30 times as fast as a loop over bins.
    """
    blocks = -(-len(values) // _BLOCK)
    padded = np.zeros(blocks * _BLOCK)
    padded[: len(values)] = values
    gap = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    within = np.where(gap >= 0, keep[:, None, None] ** np.maximum(gap, 0), 0.0)  # [decays, t, s]
    sums = padded.reshape(blocks, _BLOCK) @ within.transpose(0, 2, 1)  # [decays, blocks, t]
    fade = keep[:, None] ** np.arange(1, _BLOCK + 1)  # [decays, t]
    carry = np.zeros(len(keep))
    for block in range(blocks):
        sums[:, block] += carry[:, None] * fade
        carry = sums[:, block, -1]
    return np.asarray(sums.reshape(len(keep), -1)[:, : len(values)])
