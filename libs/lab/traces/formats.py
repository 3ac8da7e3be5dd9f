"""Public traces, one request per line.

CSV logs are Azure's LLM traces, Aegaeon's and Alibaba's GenAI. Mooncake's JSONL has prompts with hash ids, stamped by a
clock that ticks every few seconds. ServeGen's rates per time bin become requests that match each bin's rate and mean
lengths.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.traces.draws import SECOND_NS, check_count, log_normal_tokens, poisson_ns
from libs.lab.traces.lines import MAX_NS, MAX_REQUESTS, MAX_TOKENS, Fault, Source, broken, json_row, real, tokens, whole
from libs.lab.traces.request import TraceRequest

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of Azure/AzurePublicDataset, described in AzureLLMInferenceDataset2023.md and
AzureLLMInferenceDataset2024.md.
"""
AEGAEON_COLUMNS: Final = ("Request Time", "Model Name", "Input Length", "Output Length")
"""Columns of the synthetic request logs of MachineLearningSystem/25SOSP-Aegaeon."""
GENAI_COLUMNS: Final = ("t_s", "model", "exec_s", "adapters")
"""The columns of a file that is derived from alibaba/clusterdata, cluster-trace-v2026-GenAI."""

GENAI_TOKENS_PER_S: Final = 20
"""Output tokens that represent one second of an image request, equivalent to decode steps of 50 ms."""
GENAI_NOTE: Final = (
    f"The log has no tokens: a request that ran n seconds became a prompt of 1 token and {GENAI_TOKENS_PER_S} n output "
    "tokens, at least 1. It shows which model is wanted when and for about how long, and says nothing of prompts: "
    "for models that come and go, not for a replay on one model. Requests without a model that ran no "
    "time are left out."
)

_DATE_TIME: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?(Z|[+-]\d{2}:\d{2})?", re.ASCII
)
_TIME_OF_DAY: Final = re.compile(r"(\d{1,3}):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?", re.ASCII)


def read_azure(source: Source) -> Iterator[TraceRequest]:
    """Read a log of 2023 (seven fractional digits, no time zone) or of 2024 (six digits and a time zone)."""

    def request(text: str) -> TraceRequest:
        cells = source.cells(text)
        return TraceRequest(
            number=0,
            arrival_ns=date_time_ns(cells["TIMESTAMP"]),
            input_tokens=tokens(cells["ContextTokens"], "ContextTokens"),
            output_tokens=tokens(cells["GeneratedTokens"], "GeneratedTokens"),
        )

    return _in_order(source, request)


def read_aegaeon(source: Source) -> Iterator[TraceRequest]:
    """Read a log of many models, each of which is requested rarely."""

    def request(text: str) -> TraceRequest:
        cells = source.cells(text)
        return TraceRequest(
            number=0,
            arrival_ns=_time_of_day_ns(cells["Request Time"]),
            input_tokens=tokens(cells["Input Length"], "Input Length"),
            output_tokens=tokens(cells["Output Length"], "Output Length"),
            model=_named(cells["Model Name"], "Model Name"),
        )

    return _in_order(source, request)


def read_genai(source: Source) -> Iterator[TraceRequest]:
    """Read image requests, whose seconds of execution are turned into tokens (see `GENAI_NOTE`)."""
    source.notes.append(GENAI_NOTE)

    def request(text: str) -> TraceRequest | None:
        cells = source.cells(text)
        whole(cells["adapters"], "adapters", 0, MAX_TOKENS)
        run_s = real(cells["exec_s"], "exec_s", 0, MAX_TOKENS / GENAI_TOKENS_PER_S)
        if not cells["model"] and not run_s:
            return None
        return TraceRequest(
            number=0,
            arrival_ns=round(real(cells["t_s"], "t_s", 0, 1e9) * SECOND_NS),
            input_tokens=1,
            output_tokens=max(round(run_s * GENAI_TOKENS_PER_S), 1),
            model=_named(cells["model"], "model"),
        )

    return _in_order(source, request)


def _in_order(source: Source, request: Callable[[str], TraceRequest | None]) -> Iterator[TraceRequest]:
    before_ns: int | None = None
    for line, row in source.rows(request):
        if row is None:
            continue
        if before_ns is not None and row.arrival_ns < before_ns:
            raise broken(source.path, line, "its time is before that of the line above: sort the file by time")
        before_ns = row.arrival_ns
        yield row


def _named(text: str, name: str) -> str:
    if not text:
        raise Fault(f"{name} is empty")
    return text


def date_time_ns(text: str, name: str = "TIMESTAMP") -> int:
    """Return Unix ns, reading a time without a zone as UTC. `datetime` alone would drop the seventh digit."""
    found = _DATE_TIME.fullmatch(text)
    try:
        at = datetime.fromisoformat(found[1] + (found[3] or "")) if found else None
    except ValueError:
        at = None
    if at is None or found is None:
        raise Fault(f"{name} is {quoted(text)}, not a date and time")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.timestamp()) * SECOND_NS + _fraction_ns(found[2])


def _time_of_day_ns(text: str) -> int:
    found = _TIME_OF_DAY.fullmatch(text)
    if found is None:
        raise Fault(f"Request Time is {quoted(text)}, not hours:minutes:seconds")
    return (int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])) * SECOND_NS + _fraction_ns(found[4])


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "").ljust(9, "0"))


MOONCAKE_KEYS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
"""Keys of kvcache-ai/Mooncake, FAST25-release/traces.

A log with additional keys comes from another source, whose blocks or clock may differ.
"""
MOONCAKE_BLOCK_TOKENS: Final = 512
NO_SESSIONS_NOTE: Final = (
    "The log names no conversations and none are derived: a prompt that extends another may be its next turn, or a "
    "second try, or another user's with the same document, and when the first answer ended is not in the log."
)

JITTER_MS: Final = 5
"""The largest distance of a stamp from its tick. Mooncake's stamps are up to 3 ms off."""
ON_TICK_SHARE: Final = 0.99
"""The share of stamps that must lie on a tick for the clock to count as ticking."""
_MS_NS: Final = 1_000_000


def read_mooncake(source: Source) -> Iterator[TraceRequest]:
    """Read a log, spreading the arrivals of each tick over it at random, in the order of the file.

    Sessions stay 0 (see `NO_SESSIONS_NOTE`). Of the prompts in conversation_trace.jsonl that extend an earlier one, one
    in six extends several, and one in ten is shorter than the earlier prompt with its answer.
    """
    rows: list[TraceRequest] = []
    stamps_ms: list[int] = []
    for line, row in source.rows(_request):
        if stamps_ms and row.arrival_ns < stamps_ms[-1]:
            raise broken(source.path, line, "its timestamp is before that of the line above: sort the file by time")
        if len(rows) == MAX_REQUESTS:
            raise broken(source.path, line, f"more than {MAX_REQUESTS} requests")
        rows.append(row)
        stamps_ms.append(row.arrival_ns)
    source.notes.append(NO_SESSIONS_NOTE)
    tick_ms = clock_tick_ms(stamps_ms)
    if tick_ms:
        tick = f"{tick_ms / 1000:g} s"
        source.notes.append(f"The log's clock ticks every {tick}: arrivals are spread over it at random, in order.")
    arrivals_ns = spread_ns(stamps_ms, tick_ms, np.random.default_rng(source.seed))
    for row, arrival_ns in zip(rows, arrivals_ns, strict=True):
        yield replace(row, arrival_ns=arrival_ns)


def _request(text: str) -> TraceRequest:
    """Parse one line; its `arrival_ns` still holds the stamp in ms."""
    row = json_row(text)
    if row.keys() != set(MOONCAKE_KEYS):
        raise Fault(f"its keys are {', '.join(sorted(row))}, not {', '.join(MOONCAKE_KEYS)}")
    hash_ids = row["hash_ids"]
    if not isinstance(hash_ids, list):
        raise Fault("hash_ids is not a list")
    input_tokens = tokens(row["input_length"], "input_length")
    if len(hash_ids) > -(-input_tokens // MOONCAKE_BLOCK_TOKENS):
        raise Fault(f"{len(hash_ids)} hash_ids of {MOONCAKE_BLOCK_TOKENS} tokens, for a prompt of {input_tokens}")
    return TraceRequest(
        number=0,
        arrival_ns=whole(row["timestamp"], "timestamp", 0, MAX_NS // _MS_NS),
        input_tokens=input_tokens,
        output_tokens=tokens(row["output_length"], "output_length"),
        hash_ids=_hash_ids(hash_ids),
    )


def _hash_ids(values: list[object]) -> tuple[int, ...]:
    # Checked together if all are whole numbers, which halves the time of reading a trace.
    if values and set(map(type, values)) == {int}:
        ids = cast("list[int]", values)
        if min(ids) >= 0 and max(ids) <= MAX_NS:
            return tuple(ids)
    return tuple(whole(each, "one of hash_ids", 0, MAX_NS) for each in values)


def clock_tick_ms(stamps_ms: Sequence[int]) -> int:
    """Return the period of the clock that produced these ordered stamps, or 0 if they show no ticks.

    A clock ticks if several requests share a stamp and nearly all stamps lie within `JITTER_MS` of a multiple of
    one period, counted from the first stamp.
    """
    stamps = np.asarray(stamps_ms, dtype=np.int64)
    gaps = np.diff(stamps)
    jumps = gaps[gaps > 2 * JITTER_MS]
    if len(jumps) < 2 or len(jumps) + 1 == len(stamps):
        return 0
    # Begin with a low percentile, since ticks without requests make longer jumps. The mean over all jumps cancels their
    # jitter. Of the periods near it, take the one with the smallest residual.
    shortest = float(np.quantile(jumps, 0.1))
    about_ms = round(float(jumps.sum() / np.rint(jumps / shortest).sum()))
    periods = [about_ms + off for off in range(-JITTER_MS, JITTER_MS + 1) if about_ms + off > 4 * JITTER_MS]
    tick_ms = min(periods, key=lambda period: float(_off_tick_ms(stamps, period).mean()), default=0)
    # Twice the jitter, since the first stamp also has jitter.
    if not tick_ms or np.mean(_off_tick_ms(stamps, tick_ms) <= 2 * JITTER_MS) < ON_TICK_SHARE:
        return 0
    return tick_ms


def _off_tick_ms(stamps: NDArray[np.int64], tick_ms: int) -> NDArray[np.int64]:
    """Return the distance of each stamp from the nearest tick."""
    return np.asarray(np.abs((stamps - stamps[0] + tick_ms // 2) % tick_ms - tick_ms // 2))


def spread_ns(stamps_ms: Sequence[int], tick_ms: int, rng: np.random.Generator) -> list[int]:
    """Return a random arrival in ns within the tick of each stamp, preserving the order of the stamps."""
    stamps = np.asarray(stamps_ms, dtype=np.int64)
    if not tick_ms:
        return [int(stamp) * _MS_NS for stamp in stamps]
    ticks = (stamps - stamps[0] + tick_ms // 2) // tick_ms
    arrivals_ns = (ticks * tick_ms + stamps[0]) * _MS_NS + rng.integers(0, tick_ms * _MS_NS, len(stamps))
    # The ticks are already in order, so sorting everything sorts within each tick.
    arrivals_ns.sort()
    return [int(arrival_ns) for arrival_ns in arrivals_ns]


SERVEGEN_COLUMNS: Final = (
    "t_s",
    "requests_per_s",
    "known_requests_per_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
)
"""Columns derived from alibaba/ServeGen. Token rates cover only the known requests, whose lengths the source has."""

MIN_KNOWN_SHARE: Final = 0.3
"""The minimum share of a bin's requests with known lengths for which their means stand for the whole bin."""
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
    """Requests per second, with known and unknown lengths alike."""
    known_share: float
    prompt_mean: float
    output_mean: float
    """Means of the known requests; 0 if no request's lengths are known."""


def read_servegen(source: Source, start_s: float, end_s: float, rate_factor: float) -> Iterator[TraceRequest]:
    """Draw Poisson arrivals in each bin that overlaps `start_s` to `end_s`, in seconds from the first bin.

    A bin's requests depend only on the seed and the bin's index, so that a window contains the same requests as the
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
