"""A worker's finished requests and engine steps, parsed from the service's answers and as lines of text. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from libs.cli.top import draw
from libs.contracts.step_row import ReportedStep

# Cells of the surrounding box.
BESIDE: Final = 10
# Below this width the least important columns are left out.
NARROW: Final = 110
LEAST_NEEDED: Final = frozenset(("cached", "queue", "outcome"))
REQUEST_HEADS: Final = ("ended", "here", "ISL", "cached", "OSL", "queue", "TTFT", "TPOT", "outcome", "request")
# Cells of each column; the last takes the rest.
REQUEST_WIDTHS: Final = (9, 9, 8, 8, 7, 10, 10, 10, 12, 0)
# The columns of numbers.
RIGHT: Final = slice(2, 8)


@dataclass(frozen=True, slots=True)
class RequestView:
    """One finished request; None for a missing latency."""

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


def parse_requests(reported: Any) -> list[RequestView]:
    """Parse an answer of `/v1/requests`. Raise KeyError or TypeError for anything else."""
    return [RequestView(**{name: each[name] for name in RequestView.__slots__}) for each in reported]


def request_table(requests: Sequence[RequestView], worker_id: str, cells: int = NARROW) -> Text:
    """Return a line for each request, `cells` wide: this worker's part in it, and the client's waiting time."""
    shown = [place for place, head in enumerate(REQUEST_HEADS) if cells >= NARROW or head not in LEAST_NEEDED]
    text = Text(_request_line(REQUEST_HEADS, shown), "bold", no_wrap=True, overflow="ellipsis")
    id_cells = cells - BESIDE - sum(REQUEST_WIDTHS[place] for place in shown)
    for each in requests:
        style = "not bold" if each.outcome == "ok" else "not bold #ff6b9d"
        text.append(
            "\n" + _request_line((*_request_cells(each, worker_id), draw.shorten(each.id, id_cells)), shown), style
        )
    return text


def _request_cells(request: RequestView, worker_id: str) -> tuple[str, ...]:
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


def _request_line(cells: Sequence[str], shown: Sequence[int]) -> str:
    right = range(*RIGHT.indices(len(cells)))
    return "".join(
        f"{cells[place]:>{REQUEST_WIDTHS[place] - 1}} " if place in right else f"{cells[place]:{REQUEST_WIDTHS[place]}}"
        for place in shown
    )


STEP_HEADS: Final = ("began", "took", "kind", "prefill part", "prompt tokens", "prompts", "sequences", "KV tokens", "")
# Cells of each column; the last takes the rest.
STEP_WIDTHS: Final = (15, 10, 9, 14, 15, 9, 11, 12, 0)
# The maximum number of steps that the service returns: the oldest come first, and the newest are needed.
MAX_STEPS: Final = 5_000
MAX_ROWS: Final = 200
# The only column of text.
KIND: Final = 2


def parse_steps(reported: Any) -> list[ReportedStep]:
    """Parse an answer of `/v1/steps`, the newest first. Raise KeyError or TypeError for anything else."""
    return [
        ReportedStep(**{name: each[name] for name in ReportedStep.__slots__}) for each in reversed(reported["steps"])
    ]


def step_table(steps: Sequence[ReportedStep]) -> Text:
    """Return a line for each of the first `MAX_ROWS` steps, in the colour of its phase."""
    text = Text(_step_line(STEP_HEADS), "bold", no_wrap=True, overflow="ellipsis")
    for each in steps[:MAX_ROWS]:
        text.append(
            "\n" + _step_line(_step_cells(each)), f"not bold {draw.COLORS.get(each.kind, draw.COLORS['kv wait'])}"
        )
    return text


def _step_cells(step: ReportedStep) -> tuple[str, ...]:
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


def _step_line(cells: Sequence[str]) -> str:
    return "".join(
        f" {cell:{width - 1}}" if place == KIND else f"{cell:>{width}}"
        for place, (cell, width) in enumerate(zip(cells, STEP_WIDTHS, strict=True))
    )
