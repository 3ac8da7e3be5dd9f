"""A worker's engine steps, parsed from the service's answer and as lines of text. Pure."""

import time
from collections.abc import Sequence
from typing import Any, Final

from rich.text import Text

from libs.cli.top import draw
from libs.contracts.step_row import ReportedStep

HEADS: Final = ("began", "took", "kind", "prefill part", "prompt tokens", "prompts", "sequences", "KV tokens", "")
# Cells of each column; the last takes the rest.
WIDTHS: Final = (15, 10, 9, 14, 15, 9, 11, 12, 0)
# The most that the service returns. The oldest come first and the newest are wanted.
MAX_STEPS: Final = 5_000
MAX_ROWS: Final = 200
# The column that is text.
KIND: Final = 2


def parse(reported: Any) -> list[ReportedStep]:
    """Parse an answer of `/v1/steps`, the newest first. Raises KeyError or TypeError for anything else."""
    return [
        ReportedStep(**{name: each[name] for name in ReportedStep.__slots__}) for each in reversed(reported["steps"])
    ]


def table(steps: Sequence[ReportedStep]) -> Text:
    """Return a line for each of the first `MAX_ROWS` steps, in the colour of its phase."""
    text = Text(_line(HEADS), "bold", no_wrap=True, overflow="ellipsis")
    for each in steps[:MAX_ROWS]:
        text.append("\n" + _line(_cells(each)), f"not bold {draw.COLORS.get(each.kind, draw.COLORS['kv wait'])}")
    return text


def _cells(step: ReportedStep) -> tuple[str, ...]:
    seconds, rest_ns = divmod(step.start_unix_ns, 10**9)
    return (
        f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{rest_ns // 10**6:03}",
        draw.duration(step.end_unix_ns - step.start_unix_ns),
        step.kind,
        draw.percent(step.prefill_share),
        f"{step.prefill_tokens:,}",
        f"{step.prefill_sequences:,}",
        f"{step.decode_sequences:,}",
        f"{step.decode_kv_tokens:,}",
        "  still runs" if step.running else "",
    )


def _line(cells: Sequence[str]) -> str:
    return "".join(
        f" {cell:{width - 1}}" if place == KIND else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
