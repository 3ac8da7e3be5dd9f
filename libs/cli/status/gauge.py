"""Pressures and ages as coloured text. This module is pure."""

import math
from typing import Final

from rich.text import Text

from libs.cli.status.answer import CALM_CODES, UNKNOWN_CODE

# Above this pressure work accumulates in a queue.
FULL: Final = 1.0
TIGHT: Final = 0.85
SCALE: Final = 2.0
"""The pressure at which a bar is full."""
EIGHTHS: Final = " ▏▎▍▌▋▊▉"
UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
CALM, NEAR, OVER = "#3fae6b", "#d9a514", "bold #ff5c6c"


def verdict_style(code: str) -> str:
    """Return green if nothing is to be done, dim if nothing is known, else a striking style."""
    return CALM if code in CALM_CODES else "dim" if code == UNKNOWN_CODE else OVER


def pressure_style(pressure: float | None) -> str:
    """Return a style by how near a pressure is to `FULL`."""
    if pressure is None:
        return "dim"
    return OVER if pressure > FULL else NEAR if pressure > TIGHT else CALM


def pressure_text(pressure: float | None) -> Text:
    """Return a pressure as "0.42", or a question mark if it is unknown."""
    shown = "?" if pressure is None else f"{pressure:.2f}" if pressure < 10 else f"{pressure:.0f}"
    return Text(shown, pressure_style(pressure))


def pressure_bar(pressure: float | None, cells: int) -> Text:
    """Return a bar of `cells` from 0 to `SCALE` in eighths of a cell, with a line at `FULL`.

    Higher pressures end in an arrow.
    """
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
    """Return a length of time as "0.4 s", "12 s", "3 min", "2 h" or "4 d", rounded down."""
    seconds = max(ms, 0) / 1000
    if seconds < 10:
        return f"{math.floor(seconds * 10) / 10:.1f} s"
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{math.floor(seconds / size)} {unit}"
