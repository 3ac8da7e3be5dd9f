"""The parts of `fulcrum top`'s screen: above and below the table, and the table of workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rich.markup import escape
from rich.text import Text
from textual.binding import BindingType
from textual.widgets import DataTable

from libs.cli.status.show import (
    commands,
    estimate_text,
    instructions,
    other_causes,
    pressure_bar,
    pressure_text,
    span,
    verdict_style,
)
from libs.cli.status.tables import BEHIND_MS
from libs.cli.top import draw
from libs.cli.top.model import FIGURE, WINDOW_NS, Row, TopModel

MAX_TREND_CELLS: Final = 60
MAX_BAR_CELLS: Final = 60
MIN_CELLS: Final = 8
# Cells of everything other than the trend.
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
# Waiting tokens beyond this are shown in thousands, so that both phases fit a line of 80 cells.
THOUSANDS_FROM: Final = 100_000
MAX_ALERTS: Final = 3
MAX_EVENTS: Final = 3
ALARM: Final = "bold white on #b3261e"
PROBLEM: Final = "bold #ff6b9d"


def verdict(model: TopModel, wide: int) -> Text:
    """Return the verdict and the remedy, in as many lines as needed; nothing if the service is silent."""
    status = model.status
    if status is None:
        return Text()
    said = status.verdict
    style = verdict_style(said.code, status.models) if status.live else "dim"
    text = Text(
        said.sentence if status.live else f"Not live, {status.not_live_because}: {said.sentence}", f"bold {style}"
    )
    for cause in other_causes(said)[:MAX_CAUSES]:
        text.append("\n").append_text(_fitted(Text(f"also: {cause.sentence}", "yellow"), wide))
    for command in [*commands(said), *instructions(said)][:MAX_COMMANDS]:
        text.append("\n→ ", "dim").append(command, "bold cyan")
    return text


def head(model: TopModel, problem: str, wide: int, *, paused: bool) -> Text:
    """Return the ratio and its trend, coverage and age of the data, latencies, and problems."""
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
    """Cut a line to a number of cells: Textual wraps lines regardless of rich's options."""
    line.truncate(wide, overflow="ellipsis")
    return line


def _planner(model: TopModel) -> Text:
    """Return the planner's mode and its last decision."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if model.status is None:
        return text
    if model.status.observed is not None:
        away = sum(each.state in ("away", "foreign") for each in model.status.observed.servers)
        if model.status.observed.estimated or not model.status.observed.exact:
            text.append("estimated", "bold yellow").append(estimate_text(model.status.estimate))
        else:
            text.append("measured")
        if away:
            text.append(f"; {_count(away, 'server')} away", "yellow")
        if not model.status.planner.heard:
            return text
        text.append("; ")
    planner = model.status.planner
    if not planner.heard:
        return text.append("the planner does not report, so roles stay as they are", "yellow")
    text.append("planner ", "dim").append(planner.mode or "?")
    if planner.idle_because:
        text.append(f", moves nothing, as {planner.idle_because}", "yellow")
    if planner.reason and planner.acts:
        decided_ms = planner.decided_unix_ms
        age = "" if decided_ms is None else f" {span(model.status.as_of_unix_ms - decided_ms)} ago"
        text.append(f", decided{age}: ", "dim").append(planner.reason)
    return text


def _queues(model: TopModel) -> Text:
    """Describe the queues at workers and gateways."""
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
    if model.status is not None:
        traffic = model.status.traffic
        if traffic.requests_per_s:
            text.append(f"{traffic.requests_per_s:.1f}").append(" requests/s   ", "dim")
        wrong = {"429": traffic.too_many_per_s, "refused": traffic.rejected_per_s, "errors": traffic.errors_per_s}
        for name, value in wrong.items():
            if value:
                text.append(f"{name} {value:.1f}/s   ", "bold red")
    if not reported or not (reported["requests"] or reported.get("awaited")):
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


# Rows shown at a time; the filter finds the others.
MAX_ROWS: Final = 200
# The width from which the history has twice its cells.
HISTORY_WIDE: Final = 110


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    least: int = 0
    """The width of the terminal from which the column is shown."""


COLUMNS: Final = (
    Column("worker"), Column("role"), Column("node", 100), Column("last 6 s"), Column("prefill"), Column("decode"),
    Column("KV wait"), Column("idle"), Column("run"), Column("wait"), Column("tokens", 118), Column("KV", 124),
    Column("MFU", 132), Column("MBU", 140), Column("covered", 90),
)  # fmt: skip
NAMES: Final = ("worker", "role", "node")
NAME_CELLS: Final = 22


class Workers(DataTable[Any]):
    """The table of workers, with a row for each; the footer shows the action of Enter."""

    BINDINGS: ClassVar[list[BindingType]] = [("enter", "select_cursor", "requests")]

    def __init__(self) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self.by = COLUMNS[0].name
        self.reverse = False
        self._laid_out: tuple[Any, ...] = ()

    @property
    def fitting(self) -> list[Column]:
        """Return the columns for which the terminal has room."""
        return [column for column in COLUMNS if self.app.size.width >= column.least]

    def sort_by(self, name: str) -> None:
        """Sort by a column, or reverse the order if the table is already sorted by it."""
        self.reverse = not self.reverse if name == self.by else False
        self.by = name

    def sort_by_next(self, step: int) -> None:
        """Sort by the next column that has room, or by the previous one."""
        names = [column.name for column in self.fitting]
        at = names.index(self.by) if self.by in names else 0
        self.sort_by(names[(at + step) % len(names)])

    def fill(self, workers: Sequence[Row], last_ms: int) -> None:
        """Show workers and groups as of the window that starts at `last_ms`."""
        pointed = self._pointed()
        if self._lay_out():
            pointed = None  # in a new order, move the cursor to the first row
        names, wide = [column.name for column in self.fitting], self.app.size.width >= HISTORY_WIDE
        rows = {
            worker.id: _row_cells(worker, last_ms, 20 if wide else 10) for worker in self._ordered(workers, last_ms)
        }
        if list(rows) != [str(key.value) for key in self.rows]:
            self._replace(rows, names, pointed)
            return
        for worker_id, row in rows.items():
            for name in names:
                if row[name] != self.get_cell(worker_id, name):  # each change makes the table render all of its cells
                    self.update_cell(worker_id, name, row[name])

    def _lay_out(self) -> bool:
        """Rebuild the columns if others fit or the order changed, and return whether they were."""
        before, self._laid_out = self._laid_out, (self.by, self.reverse, *self.fitting)
        if before == self._laid_out:
            return False
        self.clear(columns=True)
        for column in self.fitting:
            mark = (" ▴" if self.reverse else " ▾") if column.name == self.by else ""
            self.add_column(column.name + mark, key=column.name)
        return before[:2] != self._laid_out[:2]

    def _ordered(self, workers: Sequence[Row], last_ms: int) -> list[Row]:
        return sorted(workers, key=lambda worker: _order(worker, last_ms, self.by), reverse=self.reverse)[:MAX_ROWS]

    def _pointed(self) -> str | None:
        if not self.is_valid_coordinate(self.cursor_coordinate):
            return None
        return str(self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value)

    def _replace(self, rows: dict[str, dict[str, Any]], names: Sequence[str], pointed: str | None) -> None:
        self.clear()
        for worker_id, row in rows.items():
            self.add_row(*(row[name] for name in names), key=worker_id)
        if pointed in rows:
            self.move_cursor(row=list(rows).index(pointed))


def _role(worker: Row) -> str | Text:
    """Return the role of a running worker, or the state of any other."""
    if not worker.life:
        return escape(worker.role)
    return Text(worker.life, "bold red" if worker.life == "silent" else "yellow")


def _row_cells(worker: Row, last_ms: int, history_cells: int) -> dict[str, Any]:
    times = worker.spent(last_ms)
    shares = {
        phase.replace("kv", "KV"): Text(draw.percent(spent, times[0]), draw.COLORS[phase], justify="right")
        for phase, spent in draw.parts(times).items()
    }
    numbers = {
        "run": f"{worker.running}",
        "wait": f"{worker.waiting}",
        "tokens": f"{worker.tokens:,}",
        "KV": draw.percent(worker.kv_used),
        "MFU": draw.percent(worker.mfu),
        "MBU": draw.percent(worker.mbu),
        "covered": draw.percent(times[0], worker.gpus * FIGURE * WINDOW_NS),
    }
    return {
        "worker": Text(draw.shorten(worker.label, NAME_CELLS)), "role": _role(worker),
        "node": Text(draw.shorten(worker.node, NAME_CELLS)),
        "last 6 s": draw.history(worker, last_ms, history_cells, 60 // history_cells), **shares,
        **{name: Text(number, justify="right") for name, number in numbers.items()},
    }  # fmt: skip


def _order(worker: Row, last_ms: int, column: str) -> Any:
    """Return a sort key: names ascending, figures descending."""
    if column in NAMES:
        return ({"worker": worker.label, "role": escape(worker.role), "node": worker.node}[column], worker.id)
    times = worker.spent(last_ms)
    found = {
        "run": worker.running, "wait": worker.waiting, "tokens": worker.tokens, "KV": worker.kv_used or 0,
        "MFU": worker.mfu or 0, "MBU": worker.mbu or 0, "covered": times[0],
        **{phase.replace("kv", "KV"): spent for phase, spent in draw.parts(times).items()},
    }  # fmt: skip
    return (-found.get(column, times[1] + times[2]), worker.id)
