"""Figures as coloured text. This module is pure."""

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from rich.text import Text

from libs.cli.top.model import Row, Times, ratio

# People do not read faster, and a frame of a busy cluster costs 30 ms. Events are drawn at once.
REFRESH_S: Final = 1.0
# The colours of the page; the last one is also used for dim text.
COLORS: Final = {"prefill": "#e8870e", "decode": "#4a98ee", "kv wait": "#b65cd0", "idle": "#8a96a5"}
BUSY: Final = ("prefill", "decode", "kv wait")
STEPS: Final = " ▁▂▃▄▅▆▇█"
UNKNOWN: Final = "░"


def parts(times: Times) -> dict[str, int]:
    """Return the GPU nanoseconds of each phase, idle time included."""
    covered, prefill, decode, kv_wait = times
    return {"prefill": prefill, "decode": decode, "kv wait": kv_wait, "idle": covered - prefill - decode - kv_wait}


def bar(times: Times, cells: int) -> Text:
    """Return the phases side by side, with cells dealt by largest remainder."""
    if not times[0]:
        return Text(UNKNOWN * cells, style=COLORS["idle"])
    exact = {phase: cells * value / times[0] for phase, value in parts(times).items()}
    dealt = {phase: int(value) for phase, value in exact.items()}
    for phase in sorted(exact, key=lambda each: dealt[each] - exact[each])[: cells - sum(dealt.values())]:
        dealt[phase] += 1
    return Text.assemble(*(("·" * n if phase == "idle" else "█" * n, COLORS[phase]) for phase, n in dealt.items()))


def history(worker: Row, last_ms: int, cells: int, windows: int) -> Text:
    """Return the last cells of `windows` each: as high as busy, in the colour of the largest phase."""
    drawn = (_cell(worker.spent(last_ms - 100 * windows * cell, windows)) for cell in range(cells - 1, -1, -1))
    text = Text()
    for phase, run in groupby(drawn, itemgetter(1)):  # a terminal draws stretches of one colour, however long
        text.append("".join(sign for sign, _ in run), COLORS[phase])
    return text


def _cell(times: Times) -> tuple[str, str]:
    """Return a cell's character and the phase that gives its colour."""
    covered, *busy = times
    if not covered:
        return UNKNOWN, "idle"
    if not any(busy):
        return "▁", "idle"
    return STEPS[min(round(8 * sum(busy) / covered), 8)], BUSY[busy.index(max(busy))]


def sparkline(values: Sequence[float | None], top: float = 0.0) -> str:
    """Return a sparkline up to `top`, or scaled to the greatest value if it is 0; unknown values are blank."""
    top = top or max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else STEPS[1 + min(round(7 * value / top), 7)] for value in values)


def percent(part: float | None, whole: float = 1.0) -> str:
    """Return whole percents, or a dash if nothing is known."""
    return f"{part / whole:.0%}" if part is not None and whole else "–"


def duration(ns: int | None) -> str:
    """Return milliseconds below ten seconds, else seconds, or a dash if nothing is known."""
    if ns is None:
        return "–"
    return f"{ns / 1e6:.1f} ms" if ns < 10**8 else f"{ns / 1e6:.0f} ms" if ns < 10**10 else f"{ns / 1e9:.1f} s"


def shorten(name: str, cells: int) -> str:
    """Return the end of a name, which distinguishes similar names."""
    return name if len(name) <= cells else f"…{name[1 - cells :]}"


def clock(unix_ms: int) -> str:
    """Return the time of day to the second."""
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1e3))


def latency(percentiles: Mapping[str, float | None]) -> str:
    """Return median and tail from percentiles in seconds."""
    return "/".join(
        duration(None if (value := percentiles[rank]) is None else round(value * 1e9)) for rank in ("p50", "p99")
    )


def ratio_text(times: Times) -> str:
    """Return the P:D ratio as 4.20, ∞, or a dash."""
    found = ratio(times)
    if found is None:
        return "∞" if times[1] else "–"
    return f"{found:.2f}" if found < 100 else f"{found:.0f}"
