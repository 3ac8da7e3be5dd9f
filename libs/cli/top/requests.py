"""A worker's finished requests, parsed from the service's answer and as lines of text. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from libs.cli.top import draw

# Cells of the surrounding box.
BESIDE: Final = 10
# Below this width the least important columns are left out.
NARROW: Final = 110
LEAST_NEEDED: Final = frozenset(("cached", "queue", "outcome"))
HEADS: Final = ("ended", "here", "ISL", "cached", "OSL", "queue", "TTFT", "TPOT", "outcome", "request")
# Cells of each column; the last takes the rest.
WIDTHS: Final = (9, 9, 8, 8, 7, 10, 10, 10, 12, 0)
# The columns of numbers.
RIGHT: Final = slice(2, 8)


@dataclass(frozen=True, slots=True)
class RequestView:
    """One finished request; None for a latency that it did not have."""

    id: str
    prefill_worker: str
    decode_worker: str
    end_unix_ns: int
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    ttft_ns: int | None
    tpot_ns: int | None


def parse(reported: Any) -> list[RequestView]:
    """Parse an answer of `/v1/requests`. Raises KeyError or TypeError for anything else."""
    return [RequestView(**{name: each[name] for name in RequestView.__slots__}) for each in reported]


def table(requests: Sequence[RequestView], worker_id: str, cells: int = NARROW) -> Text:
    """Return a line for each request, `cells` wide: what this worker did of it, and how long the client waited."""
    shown = [place for place, head in enumerate(HEADS) if cells >= NARROW or head not in LEAST_NEEDED]
    text = Text(_line(HEADS, shown), "bold", no_wrap=True, overflow="ellipsis")
    id_cells = cells - BESIDE - sum(WIDTHS[place] for place in shown)
    for each in requests:
        style = "not bold" if each.outcome == "ok" else "not bold #ff6b9d"
        text.append("\n" + _line((*_cells(each, worker_id), draw.shorten(each.id, id_cells)), shown), style)
    return text


def _cells(request: RequestView, worker_id: str) -> tuple[str, ...]:
    parts = {"prefill": request.prefill_worker, "decode": request.decode_worker}
    here = [phase for phase, worker in parts.items() if worker == worker_id]
    return (
        time.strftime("%H:%M:%S", time.localtime(request.end_unix_ns / 1e9)),
        "both" if len(here) == len(parts) else "".join(here),
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.output_tokens:,}",
        *map(draw.duration, (request.queue_ns, request.ttft_ns, request.tpot_ns)),
        request.outcome,
    )


def _line(cells: Sequence[str], shown: Sequence[int]) -> str:
    right = range(*RIGHT.indices(len(cells)))
    return "".join(
        f"{cells[place]:>{WIDTHS[place] - 1}} " if place in right else f"{cells[place]:{WIDTHS[place]}}"
        for place in shown
    )
