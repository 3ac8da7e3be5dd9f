"""The parts above and below the table of `fulcrum top`, as wide as the terminal. This module is pure."""

from typing import Any, Final

from rich.text import Text

from libs.cli.status.gauge import pressure_bar, pressure_text, span, verdict_style
from libs.cli.status.show import commands, other_causes
from libs.cli.tables import BEHIND_MS
from libs.cli.top import draw
from libs.cli.top.model import FIGURE, WINDOW_NS, TopModel

MAX_TREND_CELLS: Final = 60
MAX_BAR_CELLS: Final = 60
MIN_CELLS: Final = 8
# Cells of everything beside the trend.
TREND_BESIDE: Final = 58
# Cells of a pool's name, pressure and shares.
BAR_BESIDE: Final = 63
PRESSURE_CELLS: Final = 8
# Smaller shares are left out.
LEAST_SHARE: Final = 0.005
SHARE_CELLS: Final = 14
# The width from which shares stand below each other.
ROOMY: Final = 110
MAX_CAUSES: Final = 1
MAX_COMMANDS: Final = 2
LATENCIES: Final = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("queue", "queue_s"))
# The width from which the last of them fits.
QUEUE_FITS: Final = 96
# From here on waiting tokens are counted in thousands, so that both phases fit a line of 80 cells.
THOUSANDS_FROM: Final = 100_000
MAX_ALERTS: Final = 3
MAX_EVENTS: Final = 3
ALARM: Final = "bold white on #b3261e"
PROBLEM: Final = "bold #ff6b9d"


def verdict(model: TopModel, wide: int) -> Text:
    """Return what is wrong and what to do about it, in as many lines as needed; nothing if the service is silent."""
    status = model.status
    if status is None:
        return Text()
    said = status.verdict
    style = verdict_style(said.code) if status.live else "dim"
    text = Text(
        said.sentence if status.live else f"Not live, {status.not_live_because}: {said.sentence}", f"bold {style}"
    )
    for cause in other_causes(said)[:MAX_CAUSES]:
        text.append("\n").append_text(_fitted(Text(f"also: {cause.sentence}", "yellow"), wide))
    for command in commands(said)[:MAX_COMMANDS]:
        text.append("\n→ ", "dim").append(command, "bold cyan")
    return text


def head(model: TopModel, problem: str, wide: int, *, paused: bool) -> Text:
    """Return the ratio and its trend, coverage and age of the data, latencies, and what is wrong."""
    workers = list(model.workers.values())
    times = model.spent(workers)
    gpus = sum(worker.gpus for worker in workers)
    text = Text.assemble(("P:D ", "bold"), (f"{draw.ratio_text(times)} : 1", "bold"), " ", no_wrap=True)
    text.append(draw.sparkline(model.trend(_cells(wide - TREND_BESIDE, MAX_TREND_CELLS))), draw.COLORS["prefill"])
    text.append(f" {_count(gpus, 'GPU')} covered {draw.percent(times[0], gpus * FIGURE * WINDOW_NS)} ")
    if model.firing:
        text.append(f" {_count(len(model.firing), 'alert')} ", ALARM)
    if model.age_ms is not None:
        behind = model.age_ms > BEHIND_MS
        text.append(
            *((f" {model.age_ms // 1000} s behind ", ALARM) if behind else (f" {span(model.age_ms)} old", "dim"))
        )
    if paused:
        text.append(" paused ", "reverse")
    text.append("\n").append_text(_queues(model))
    text.append("\n").append_text(_requests(model, wide))
    if (planner := _planner(model)).plain:
        text.append("\n").append_text(_fitted(planner, wide))
    if problem:
        since = f"; figures are those of {draw.clock(model.last_ms)}" if model.last_ms else ""
        text.append(f"\n{problem}{since}", PROBLEM)
    return text


def _fitted(line: Text, wide: int) -> Text:
    """Cut a line to a number of cells: Textual wraps lines whatever rich's options say."""
    line.truncate(wide, overflow="ellipsis")
    return line


def _planner(model: TopModel) -> Text:
    """Return the planner's mode and its last decision."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if model.status is None:
        return text
    planner = model.status.planner
    if not planner.heard:
        return text.append("the planner is not heard: roles stay as they are", "yellow")
    text.append("planner ", "dim").append(planner.mode or "?")
    if planner.idle_because:
        text.append(f", moves nothing, as {planner.idle_because}", "yellow")
    if planner.reason and planner.acts:
        age = "" if planner.decided_unix_ms is None else span(model.status.as_of_unix_ms - planner.decided_unix_ms)
        text.append(f" {age} ago: ", "dim").append(planner.reason)
    return text


def _queues(model: TopModel) -> Text:
    """Return what waits at workers and gateways."""
    text = Text(no_wrap=True)
    for phase in ("prefill", "decode"):
        queue = model.queue(phase)
        reported = "unknown" if queue is None else f"{queue[0]:,}"
        text.append(f"waiting for {phase} ", "dim").append(reported)
        if queue and queue[1]:
            tokens = f"{queue[1]:,}" if queue[1] < THOUSANDS_FROM else f"{queue[1] / 1000:,.0f}k"
            text.append(f" of {tokens} tokens", "dim")
        text.append("   ")
    text.rstrip()
    return text


def _requests(model: TopModel, wide: int) -> Text:
    reported, text = model.requests, Text(no_wrap=True, overflow="ellipsis")
    if model.status is not None and model.status.traffic.requests_per_s:
        traffic = model.status.traffic
        text.append(f"{traffic.requests_per_s:.1f}").append(" requests/s   ", "dim")
        for name, value in (("429", traffic.too_many_per_s), ("errors", traffic.errors_per_s)):
            if value:
                text.append(f"{name} {value:.1f}/s   ", "bold red")
    if not reported or not reported["requests"]:
        return text if text.plain else Text("no request has ended in the last minute", "dim")
    for name, field in LATENCIES if wide >= QUEUE_FITS else LATENCIES[:2]:
        text.append(f"{name} ", "dim").append(f"{draw.latency(reported[field])}   ")
    return text.append(f"p50/p99 of {reported['requests']:,} in 1m" if wide >= QUEUE_FITS else "p50/p99", "dim")


def pools(model: TopModel, wide: int) -> Text:
    """Return each role that a worker has: pressure beside occupancy, and the shares that are not zero."""
    text, cells = Text(no_wrap=True), _cells(wide - BAR_BESIDE, MAX_BAR_CELLS)
    for role in ("prefill", "decode", "mixed", "standby"):
        members = [worker for worker in model.workers.values() if worker.role == role]
        if not members:
            continue
        times = model.spent(members)
        text.append(f"{role:8}{sum(worker.gpus for worker in members):4} ")
        text.append_text(_pressed(model, role))
        text.append_text(draw.bar(times, cells))
        for phase, spent in draw.parts(times).items():
            if times[0] and spent / times[0] >= LEAST_SHARE:
                shown = f" {phase.replace('kv', 'KV')} {draw.percent(spent, times[0])}"
                text.append(f"{shown:<{SHARE_CELLS}}" if wide >= ROOMY else shown, draw.COLORS[phase])
        text.append("\n")
    text.rstrip()
    return text


def _pressed(model: TopModel, role: str) -> Text:
    """Return the pressure of the worst-off model, or blank if the role has none."""
    if model.status is None:
        return Text()
    if role not in ("prefill", "decode"):
        return Text(" " * (PRESSURE_CELLS + 6))
    known = [each.prefill if role == "prefill" else each.decode for each in model.status.models if each.known]
    pressure = max((pool.pressure for pool in known if pool.pressure is not None), default=None)
    number = pressure_text(pressure)
    number.pad_left(4 - len(number.plain))
    return Text.assemble(number, " ", pressure_bar(pressure, PRESSURE_CELLS), " ")


def alerts(model: TopModel, most: int = MAX_ALERTS, *, wide: int) -> Text:
    """Return the firing alerts with their labels, critical ones first."""
    firing = sorted(model.firing.values(), key=_urgency)
    lines = []
    for place, alert in enumerate(firing[:most]):
        name = " ".join((alert["name"].removeprefix("Fulcrum"), *alert["labels"].values()))
        line = Text(f"▲ {name}", "bold #ff6b9d")
        more = len(firing) - most
        line.append(f" and {more} more" if place == most - 1 and more > 0 else "", "dim")
        lines.append(_fitted(line.append(f"  {alert['reason']}", "not bold default"), wide))
    return Text("\n").join(lines)


def _urgency(alert: dict[str, Any]) -> tuple[bool, int]:
    return alert["severity"] != "critical", -alert["started_unix_ms"]


def events(model: TopModel, most: int = MAX_EVENTS, *, wide: int) -> Text:
    """Return the last events, the newest at the bottom."""
    newest = list(model.lines)[-most:]
    return Text("\n").join(_fitted(Text(f"{draw.clock(at)} {line}"), wide) for at, line in newest)


def _cells(room: int, most: int) -> int:
    return max(MIN_CELLS, min(room, most))


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + ("s" if number != 1 else "")
