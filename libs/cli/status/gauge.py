"""Pressure and ages as coloured text. Pure."""

import math
from typing import Final

from rich.text import Text

from libs.cli.status.answer import CALM_CODES, UNKNOWN_CODE

FULL: Final = 1.0
"""Above it, work grows into a queue."""
TIGHT: Final = 0.85
SCALE: Final = 2.0
"""The pressure at which a bar is full."""
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
CALM, NEAR, OVER = "#3fae6b", "#d9a514", "bold #ff5c6c"


def verdict_style(code: str) -> str:
    """Green where nothing is to be done, dim where nothing is known, else what stands out."""
    return CALM if code in CALM_CODES else "dim" if code == UNKNOWN_CODE else OVER


def pressure_style(pressure: float | None) -> str:
    """By how near it is to `FULL`."""
    if pressure is None:
        return "dim"
    return OVER if pressure > FULL else NEAR if pressure > TIGHT else CALM


def pressure_text(pressure: float | None) -> Text:
    """ "0.42"; a question mark where it is not known."""
    shown = "?" if pressure is None else f"{pressure:.2f}" if pressure < 10 else f"{pressure:.0f}"
    return Text(shown, pressure_style(pressure))


def pressure_bar(pressure: float | None, cells: int) -> Text:
    """A bar of `cells` from 0 to `SCALE`, in eighths of a cell, with a line at `FULL`; higher pressures end in an
    arrow."""
    if pressure is None:
        return Text("░" * cells, "dim")
    eighths = round(min(max(pressure, 0.0) / SCALE, 1.0) * cells * 8)
    whole, part = divmod(eighths, 8)
    bar = ("█" * whole + (EIGHTHS[part] if part else "")).ljust(cells)
    if pressure > SCALE:
        bar = bar[:-1] + "▶"
    at = round(cells * FULL / SCALE)
    text = Text(bar, pressure_style(pressure))
    if at >= whole + bool(part):
        text = Text.assemble((bar[:at], pressure_style(pressure)), ("│", "dim"), bar[at + 1 :])
    return text


def span(ms: float) -> str:
    """ "0.4 s", "12 s", "3 min", "2 h", "4 d": a length of time, coarser the longer it is, never more than it is."""
    seconds = max(ms, 0) / 1000
    if seconds < 10:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{math.floor(seconds / size)} {unit}"
