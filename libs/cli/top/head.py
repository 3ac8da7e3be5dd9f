"""What stands above and below the table of `fulcrum top`, as wide as the terminal. Pure."""

from typing import Any, Final

from rich.text import Text

from libs.cli.tables import BEHIND_MS
from libs.cli.top import draw
from libs.cli.top.model import FIGURE, WINDOW_NS, Model

MAX_TREND_CELLS: Final = 60
MAX_BAR_CELLS: Final = 60
MIN_CELLS: Final = 8
TREND_BESIDE: Final = 58
"""Cells of what stands beside the trend."""
BAR_BESIDE: Final = 66
"""Cells of a pool's name and shares."""
LATENCIES: Final = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("queue", "queue_s"))
QUEUE_FITS: Final = 96
"""Cells from which there is room for the last of them."""
MAX_ALERTS: Final = 3
MAX_EVENTS: Final = 3
ALARM: Final = "bold white on #b3261e"
PROBLEM: Final = "bold #ff6b9d"


def head(model: Model, problem: str, wide: int, *, paused: bool) -> Text:
    """The ratio and its trend, how much is known, what requests met, and what is wrong."""
    workers = list(model.workers.values())
    times = model.spent(workers)
    gpus = sum(worker.gpus for worker in workers)
    text = Text.assemble(("P:D ", "bold"), (f"{draw.ratio_text(times)} : 1", "bold"), "  ", no_wrap=True)
    text.append(draw.sparkline(model.trend(_cells(wide - TREND_BESIDE, MAX_TREND_CELLS))), draw.COLORS["prefill"])
    text.append(f"  {_count(gpus, 'GPU')}  covered {draw.percent(times[0], gpus * FIGURE * WINDOW_NS)}  ")
    if model.firing:
        text.append(f" {_count(len(model.firing), 'alert')} ", ALARM)
    if model.age_ms is not None and model.age_ms > BEHIND_MS:
        text.append(f" {model.age_ms // 1000} s behind ", ALARM)
    if paused:
        text.append(" paused ", "reverse")
    text.append("\n")
    text.append_text(_requests(model, wide))
    text.append("\n").append_text(_queues(model))
    if problem:
        since = f"; figures are those of {draw.clock(model.last_ms)}" if model.last_ms else ""
        text.append(f"\n{problem}{since}", PROBLEM)
    return text


def _queues(model: Model) -> Text:
    """What waits, at workers and gateways."""
    text = Text(no_wrap=True)
    for phase in ("prefill", "decode"):
        queue = model.queue(phase)
        told = "unknown" if queue is None else f"{queue[0]:,}"
        text.append(f"waiting for {phase} ", "dim").append(told)
        if queue and queue[1]:
            text.append(f" of {queue[1]:,} tokens", "dim")
        text.append("   ")
    text.rstrip()
    return text


def _requests(model: Model, wide: int) -> Text:
    told = model.requests
    if not told or not told["requests"]:
        return Text("no request has ended in the last minute", "dim")
    text = Text(no_wrap=True)
    for name, field in LATENCIES if wide >= QUEUE_FITS else LATENCIES[:2]:
        text.append(f"{name} ", "dim").append(f"{draw.latency(told[field])}   ")
    return text.append(f"p50/p99 of {told['requests']:,} in 1m", "dim")


def pools(model: Model, wide: int) -> Text:
    """A bar and the shares of each role that somebody has."""
    text, cells = Text(no_wrap=True), _cells(wide - BAR_BESIDE, MAX_BAR_CELLS)
    for role in ("prefill", "decode", "mixed", "standby"):
        members = [worker for worker in model.workers.values() if worker.role == role]
        if not members:
            continue
        times = model.spent(members)
        text.append(f"{role:8}{sum(worker.gpus for worker in members):4} ")
        text.append_text(draw.bar(times, cells))
        for phase, spent in draw.parts(times).items():
            text.append(f"  {phase.replace('kv', 'KV')} {draw.percent(spent, times[0]):<4}", draw.COLORS[phase])
        text.append("\n")
    text.rstrip()
    return text


def alerts(model: Model) -> Text:
    """Those that fire, the critical first."""
    firing = sorted(model.firing.values(), key=_urgency)
    text = Text(no_wrap=True, overflow="ellipsis")
    for place, alert in enumerate(firing[:MAX_ALERTS]):
        more = len(firing) - MAX_ALERTS
        text.append("\n" if place else "").append(f"▲ {alert['name']}", "bold #ff6b9d")
        if place == MAX_ALERTS - 1 and more > 0:
            text.append(f" and {more} more", "dim")
        text.append(f"  {alert['reason']}")
    return text


def _urgency(alert: dict[str, Any]) -> tuple[bool, int]:
    return alert["severity"] != "critical", -alert["started_unix_ms"]


def events(model: Model) -> Text:
    """What happened last, the newest at the bottom."""
    newest = list(model.lines)[-MAX_EVENTS:]
    return Text("\n".join(f"{draw.clock(at)} {line}" for at, line in newest), no_wrap=True, overflow="ellipsis")


def _cells(room: int, most: int) -> int:
    return max(MIN_CELLS, min(room, most))


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + ("s" if number != 1 else "")
