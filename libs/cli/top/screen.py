"""The screen of `fulcrum top`."""

import asyncio
from contextlib import suppress
from typing import Any, ClassVar, Final

import httpx
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.css.query import NoMatches
from textual.widgets import DataTable, Footer, Input, Static

from libs.cli.find import no_suite
from libs.cli.top import draw
from libs.cli.top.detail import Detail
from libs.cli.top.feed import Feed
from libs.cli.top.model import FIGURE, WorkerView

TREND_CELLS: Final = 48
COLUMNS: Final = (
    "worker",
    "role",
    "node",
    "last 6 s",
    "prefill",
    "decode",
    "KV wait",
    "idle",
    "run",
    "wait",
    "tokens",
    "KV",
    "MFU",
    "MBU",
    "covered",
)
MAX_ROWS: Final = 200
"""Shown at a time; the filter finds the others."""


class Workers(DataTable[Any]):
    """A row each; the footer says what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [("enter", "select_cursor", "requests")]


class Top(App[None]):
    """Header, pools, workers, and what happens."""

    TITLE = "fulcrum top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { padding: 0 1; height: auto; }
    #pools { padding: 0 1; height: auto; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    #events { padding: 0 1; height: 4; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("space", "pause", "pause"), ("s", "sort", "sort"), ("r", "reverse", "reverse"), ("slash", "filter", "filter"),
        ("t", "theme", "light/dark"), ("q", "quit", "quit"),
    ]  # fmt: skip

    def __init__(self, feed: Feed, *, light: bool = False) -> None:
        super().__init__()
        self.feed = feed
        self.paused = False
        self.theme = "textual-light" if light else "textual-dark"
        self._sort = 0
        self._reverse = False

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static(id="head")
        yield Static(id="pools")
        yield Input(placeholder="part of a worker's, node's, role's or model's name", id="filter")
        yield Workers(cursor_type="row", zebra_stripes=True)
        yield Static(id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Follow the service for as long as the app runs."""
        table = self.query_one(DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        self.run_worker(self.feed.follow(), exit_on_error=True)
        self.run_worker(self.feed.poll(), exit_on_error=True)
        self.set_interval(draw.REFRESH_S, self.show)

    def show(self) -> None:
        """Draw what the model holds now; nothing once the app closes, whose widgets go before its timers."""
        if not self.paused:
            with suppress(NoMatches):
                self._draw()

    def _draw(self) -> None:
        model = self.feed.model
        workers = list(model.workers.values())
        times = model.spent(workers)
        whole = sum(worker.gpus for worker in workers) * FIGURE * 100_000_000
        head = Text.assemble(("P:D ", "bold"), (f"{draw.ratio_text(times)} : 1", "bold"), "  ")
        head.append(draw.sparkline(model.trend(TREND_CELLS)), draw.COLORS["prefill"])
        head.append(f"  {len(workers)} workers  covered {draw.percent(times[0], whole)}  ")
        if model.firing:
            head.append(f" {len(model.firing)} alerts ", "bold white on #b3261e")
        if self.feed.problem:
            head.append(f"  {self.feed.problem}", "bold #ff6b9d")
        self.query_one("#head", Static).update(head)
        self.query_one("#pools", Static).update(self._pools(workers))
        self._fill(workers)
        self.query_one("#events", Static).update(
            Text("\n".join(list(model.lines)[-4:]), no_wrap=True, overflow="ellipsis")
        )

    def _pools(self, workers: list[WorkerView]) -> Text:
        text = Text()
        for role in ("prefill", "decode", "mixed", "standby"):
            members = [worker for worker in workers if worker.role == role]
            if members:
                times = self.feed.model.spent(members)
                text.append(f"{role:8}{len(members):4} ")
                text.append_text(draw.bar(times, 40))
                for phase, spent in draw.parts(times).items():
                    text.append(f"  {phase} {draw.percent(spent, times[0])}", draw.COLORS[phase])
                text.append("\n")
        return text

    def _fill(self, workers: list[WorkerView]) -> None:
        table, last_ms = self.query_one(DataTable), self.feed.model.last_ms
        wanted = self.query_one("#filter", Input).value
        found = [
            worker
            for worker in workers
            if any(wanted in name for name in (worker.id, worker.node, worker.role, worker.model))
        ]
        found.sort(key=lambda worker: _order(worker, last_ms, COLUMNS[self._sort]), reverse=self._reverse)
        rows = {worker.id: _cells(worker, last_ms) for worker in found[:MAX_ROWS]}
        if list(rows) != [str(key.value) for key in table.rows]:
            at = table.cursor_row
            table.clear()
            for worker_id, cells in rows.items():
                table.add_row(*cells, key=worker_id)
            table.move_cursor(row=at)
            return
        for worker_id, cells in rows.items():
            for name, cell in zip(COLUMNS, cells, strict=True):
                table.update_cell(worker_id, name, cell)

    def action_pause(self) -> None:
        """Stop the picture, or go on."""
        self.paused = not self.paused
        self.sub_title = "paused" if self.paused else ""

    def action_sort(self) -> None:
        """By the next column."""
        self._sort = (self._sort + 1) % len(COLUMNS)
        self.notify(f"by {COLUMNS[self._sort]}", timeout=1)

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._reverse = not self._reverse

    def action_filter(self) -> None:
        """Type part of a name."""
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def on_input_submitted(self) -> None:
        """Back to the table; an empty filter goes."""
        field = self.query_one("#filter", Input)
        field.set_class(bool(field.value), "open")
        self.query_one(DataTable).focus()

    def action_theme(self) -> None:
        """Light or dark."""
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """A worker, closer, and its requests."""
        worker = self.feed.model.workers.get(str(event.row_key.value))
        if worker:
            self.push_screen(Detail(self.feed, worker))


def _cells(worker: WorkerView, last_ms: int) -> list[Any]:
    times = worker.spent(last_ms)
    shares = [
        Text(draw.percent(spent, times[0]), draw.COLORS[phase], justify="right")
        for phase, spent in draw.parts(times).items()
    ]
    numbers = [
        f"{worker.running}",
        f"{worker.waiting}",
        f"{worker.tokens:,}",
        *map(draw.percent, (worker.kv_used, worker.mfu, worker.mbu)),
    ]
    numbers.append(draw.percent(times[0], worker.gpus * FIGURE * 100_000_000))
    return [
        worker.id, worker.role, worker.node, draw.history(worker, last_ms, 20, 3), *shares,
        *(Text(number, justify="right") for number in numbers),
    ]  # fmt: skip


def _order(worker: WorkerView, last_ms: int, column: str) -> Any:
    """What a column is sorted by: names upwards, figures from the greatest."""
    if column in ("worker", "role", "node"):
        return ({"worker": worker.id, "role": worker.role, "node": worker.node}[column], worker.id)
    times = worker.spent(last_ms)
    found = {
        "run": worker.running, "wait": worker.waiting, "tokens": worker.tokens, "KV": worker.kv_used or 0,
        "MFU": worker.mfu or 0, "MBU": worker.mbu or 0, "covered": times[0],
        **dict(zip(COLUMNS[4:8], draw.parts(times).values(), strict=True)),
    }  # fmt: skip
    return (-found.get(column, times[1] + times[2]), worker.id)


def run_screen(url: str, *, light: bool) -> None:
    """Until the person quits. Raises StartupError when nobody answers at first."""
    try:
        httpx.get(f"{url}/healthz", timeout=5, trust_env=False).raise_for_status()
    except httpx.HTTPError:
        raise no_suite(url) from None
    asyncio.run(Top(Feed(url), light=light).run_async())
