"""Mooncake's JSONL logs: prompts with hash ids, stamped by a clock that ticks every few seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.lab.traces.lines import MAX_NS, MAX_REQUESTS, Fault, Source, broken, json_row, tokens, whole
from libs.lab.traces.request import TraceRequest

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
    """Read a log, spreading the arrivals of each tick over it at random in the order of the file.

    Sessions stay 0 (see `NO_SESSIONS_NOTE`). Of the prompts in conversation_trace.jsonl that extend an earlier one,
    one in six extends several, and one in ten is shorter than the earlier prompt with its answer.
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
        hash_ids=tuple(whole(each, "one of hash_ids", 0, MAX_NS) for each in hash_ids),
    )


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
    # Begin with a low percentile, since ticks without requests make longer jumps. The mean over all jumps cancels
    # their jitter. Of the periods near it, take the one that leaves the least.
    shortest = float(np.quantile(jumps, 0.1))
    about_ms = round(float(jumps.sum() / np.rint(jumps / shortest).sum()))
    periods = [about_ms + off for off in range(-JITTER_MS, JITTER_MS + 1) if about_ms + off > 4 * JITTER_MS]
    tick_ms = min(periods, key=lambda period: float(_off_tick_ms(stamps, period).mean()), default=0)
    # Twice the jitter, since the first stamp has its own.
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
    # The ticks are in order already, so sorting all sorts within each tick.
    arrivals_ns.sort()
    return [int(arrival_ns) for arrival_ns in arrivals_ns]
