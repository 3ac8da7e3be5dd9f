"""ServeGen's rates per time bin, turned into requests that match each bin's rate and mean lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.draws import SECOND_NS, check_count, log_normal_tokens, poisson_ns
from libs.lab.traces.lines import MAX_TOKENS, Source, broken, real
from libs.lab.traces.request import TraceRequest

SERVEGEN_COLUMNS: Final = (
    "t_s",
    "requests_per_s",
    "known_requests_per_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
)
"""Columns derived from alibaba/ServeGen. Token rates cover only the known requests, whose lengths the source has."""

MIN_KNOWN_SHARE: Final = 0.3
"""The least share of a bin's requests with known lengths for which their means stand for the whole bin."""
PROMPT_SPREAD: Final = 1.0
OUTPUT_SPREAD: Final = 0.8
"""Standard deviations of the logarithm of lengths, equivalent to coefficients of variation of 1.3 and 0.95.

ServeGen (arXiv:2505.09999) finds heavy-tailed prompts, and outputs near an exponential distribution, whose
coefficient is 1.
"""
MAX_BINS: Final = 1_000_000
LONE_BIN_S: Final = 600.0
"""The duration assumed for the only bin of a file."""
MAX_RATE: Final = 1e9


@dataclass(frozen=True, slots=True)
class _Bin:
    start_s: float
    rate: float
    """Requests a second, with known and unknown lengths alike."""
    known_share: float
    prompt_mean: float
    output_mean: float
    """Means of the known requests; 0 if no request's lengths are known."""


def read_servegen(source: Source, start_s: float, end_s: float, rate_factor: float) -> Iterator[TraceRequest]:
    """Draw Poisson arrivals in each bin that overlaps `start_s` to `end_s`, in seconds from the first bin.

    A bin's requests depend only on the seed and the bin's index, so that a window has the same requests as the
    whole file.
    """
    bins = _bins(source)
    width_s = bins[1].start_s - bins[0].start_s if len(bins) > 1 else LONE_BIN_S
    prompt_means, output_means = _means(source, bins)
    chosen = [
        place
        for place, each in enumerate(bins)
        if (each.start_s - bins[0].start_s) < end_s and (each.start_s - bins[0].start_s) + width_s > start_s
    ]
    check_count(sum(bins[place].rate for place in chosen) * width_s * rate_factor)
    masked = sum(bins[place].known_share < MIN_KNOWN_SHARE for place in chosen)
    source.notes.append(
        f"Drawn from {len(chosen)} bins of {width_s:g} s: Poisson arrivals at {rate_factor:g} times the rate of all "
        f"requests, log-normal lengths around the mean of those known (spread {PROMPT_SPREAD:g} for prompts, "
        f"{OUTPUT_SPREAD:g} for outputs)."
    )
    if masked:
        source.notes.append(
            f"In {masked} of these bins lengths are known of less than {MIN_KNOWN_SHARE:.0%} of the requests: their "
            "means come from the bins around them."
        )
    for place in chosen:
        rng = np.random.default_rng([source.seed, place])
        times_ns = poisson_ns(rng, bins[place].rate * rate_factor, width_s)
        times_ns += round((bins[place].start_s - bins[0].start_s) * SECOND_NS)
        prompts = log_normal_tokens(rng, prompt_means[place], PROMPT_SPREAD, len(times_ns))
        outputs = log_normal_tokens(rng, output_means[place], OUTPUT_SPREAD, len(times_ns))
        for arrival_ns, prompt, output in zip(times_ns.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            yield TraceRequest(number=0, arrival_ns=arrival_ns, input_tokens=prompt, output_tokens=output)


def _bins(source: Source) -> list[_Bin]:
    bins: list[_Bin] = []
    for line, (start_s, rate, known, prefill, decode) in source.rows(
        lambda text: [real(source.cells(text)[name], name, 0, MAX_RATE) for name in SERVEGEN_COLUMNS]
    ):
        if len(bins) == MAX_BINS:
            raise broken(source.path, line, f"more than {MAX_BINS} bins")
        if bins and start_s <= bins[-1].start_s:
            raise broken(source.path, line, "its t_s is not after that of the line above")
        if len(bins) > 1 and abs(start_s - bins[-1].start_s - (bins[1].start_s - bins[0].start_s)) > 1e-6:
            raise broken(source.path, line, "this bin is not as far from the one above as the first two are")
        if known > rate * 1.001 + 0.001:  # the columns are rounded
            raise broken(source.path, line, f"known_requests_per_s is {known:g}, over requests_per_s, {rate:g}")
        if known and min(prefill, decode) < known * 0.999:
            raise broken(source.path, line, "its known requests have less than one prefill or decode token each")
        if known and max(prefill, decode) > known * MAX_TOKENS:
            raise broken(source.path, line, f"its known requests have over {MAX_TOKENS} tokens each")
        share = known / rate if rate else 1.0
        bins.append(_Bin(start_s, rate, share, *((prefill / known, decode / known) if known else (0.0, 0.0))))
    if not bins:
        raise InvalidRequest(f"{source.path}: no bin after the header")
    return bins


def _means(source: Source, bins: Sequence[_Bin]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean prompt and output lengths of each bin, interpolated linearly where too few lengths are known."""
    known = [each for each in bins if each.known_share >= MIN_KNOWN_SHARE and each.prompt_mean]
    if not known:
        raise InvalidRequest(
            f"{source.path}: no bin in which lengths are known of {MIN_KNOWN_SHARE:.0%} of the requests or more"
        )
    starts_s, known_s = ([each.start_s for each in some] for some in (bins, known))
    prompts = np.interp(starts_s, known_s, [each.prompt_mean for each in known])
    outputs = np.interp(starts_s, known_s, [each.output_mean for each in known])
    return np.asarray(prompts), np.asarray(outputs)
