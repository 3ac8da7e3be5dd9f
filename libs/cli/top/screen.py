"""The output of `fulcrum top`: the screen, that of a group of workers, or snapshots for pipes."""

import asyncio
from contextlib import suppress
from typing import Any, ClassVar, Final

import httpx
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from libs.cli.find import no_suite
from libs.cli.top import draw
from libs.cli.top.detail import Detail, figures
from libs.cli.top.feed import Feed
from libs.cli.top.head import MAX_ALERTS, MAX_EVENTS, Workers, alerts, events, head, pools, verdict
from libs.cli.top.model import GroupRow, Row


class GroupDetail(ModalScreen[None]):
    """A group above a table of its ranks; Enter opens a rank."""

    CSS = """
    GroupDetail { align: center middle; }
    #group { width: 150; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: round $primary;
             background: $surface; }
    #group DataTable { height: auto; max-height: 24; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss", "back")]

    def __init__(self, feed: Feed, group: GroupRow) -> None:
        super().__init__()
        self._feed = feed
        self._group = group

    def compose(self) -> ComposeResult:
        with Vertical(id="group"):
            yield Static(id="whole")
            yield Workers()

    def on_mount(self) -> None:
        """Follow the group while the screen is open."""
        self.query_one(Workers).focus()
        self.set_interval(draw.REFRESH_S, self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        group = self._feed.model.groups.get(self._group.id, self._group)  # a different object when ranks come or go
        last_ms = self._feed.model.last_ms
        text = Text.assemble((group.label, "bold"), f"  {group.role}, {group.model}, {group.gpus} GPUs\n\n")
        text.append_text(figures(group, last_ms))
        self.query_one("#whole", Static).update(text)
        self.query_one(Workers).fill(group.ranks, last_ms)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort the ranks by the clicked column, not the table below."""
        event.stop()
        self.query_one(Workers).sort_by(str(event.column_key.value))
        self._refresh()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        worker: Any = self._feed.model.workers.get(str(event.row_key.value))
        if worker:
            self.app.push_screen(Detail(self._feed, worker))


# On a lower terminal events are left out.
LEAST_HIGH: Final = 20
# On a lower terminal alerts are only counted and events have `FEW` lines, so that workers stay visible.
ROOMY_HIGH: Final = 32
FEW: Final = 1


class ScreenPart(Static):
    """Text above or below the table, redrawn only if it differs and laid out again only if its height may."""

    shown = Text()

    def show(self, text: Text, *, wraps: bool = False) -> None:
        """Show a text. If it `wraps`, its height may depend on its length."""
        before, self.shown = self.shown, text
        if text != before:
            height = text.cell_len != before.cell_len if wraps else text.plain.count("\n") != before.plain.count("\n")
            self.update(text, layout=height or not before.plain)


class Top(App[None]):
    """The app of `fulcrum top`: header, pools, workers and events."""

    TITLE = "fulcrum top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #verdict, #head, #pools, #alerts, #events { padding: 0 1; height: auto; }
    #filter { display: none; height: 3; }
    #filter.open { display: block; }
    DataTable { height: 1fr; }
    #events { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("space", "pause", "pause"), ("s", "sort(1)", "sort"), ("S", "sort(-1)", ""), ("r", "reverse", "reverse"),
        ("slash", "filter", "filter"), ("t", "theme", "light/dark"), ("q", "quit", "quit"),
    ]  # fmt: skip

    def __init__(self, feed: Feed, *, light: bool = False) -> None:
        super().__init__()
        self.feed = feed
        self.paused = False
        self.theme = "textual-light" if light else "textual-dark"

    def compose(self) -> ComposeResult:
        yield ScreenPart(id="verdict")
        yield ScreenPart(id="pools")
        yield ScreenPart(id="head")
        yield Input(placeholder="part of a worker's, node's, role's or model's name", id="filter")
        yield Workers()
        yield ScreenPart(id="alerts")
        yield ScreenPart(id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Follow the service while the app runs."""
        self.query_one(Workers).focus()
        self.run_worker(self.feed.follow(), exit_on_error=True)
        self.run_worker(self.feed.poll(), exit_on_error=True)
        self.set_interval(draw.REFRESH_S, self.show)
        self.feed.on_news = self.show

    def show(self) -> None:
        """Draw the model. Do nothing while the app closes, because its widgets are removed before its timers."""
        if not self.paused:
            with suppress(NoMatches):
                self._draw()

    def _draw(self) -> None:
        model, wide = self.feed.model, self.size.width - 2
        low = self.size.height < ROOMY_HIGH
        said = self.query_one("#verdict", ScreenPart)
        said.display = model.status is not None
        said.show(verdict(model, wide), wraps=True)
        self.query_one("#head", ScreenPart).show(head(model, self.feed.problem, wide, paused=self.paused))
        self.query_one("#pools", ScreenPart).show(pools(model, wide))
        self.query_one(Workers).fill(self._wanted(), model.last_ms)
        firing, happened = self.query_one("#alerts", ScreenPart), self.query_one("#events", ScreenPart)
        # On a small screen, the verdict names the alert, and the head shows the number of alerts.
        firing.display = bool(model.firing) and not (low and model.status is not None)
        firing.show(alerts(model, MAX_ALERTS, wide=wide))
        happened.display = self.size.height >= LEAST_HIGH and bool(model.lines)
        happened.show(events(model, FEW if low else MAX_EVENTS, wide=wide))

    def _wanted(self) -> list[Row]:
        wanted = self.query_one("#filter", Input).value.casefold()
        return [row for row in self.feed.model.rows if any(wanted in name.casefold() for name in row.names)]

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw()

    def action_sort(self, step: int) -> None:
        """Sort by the next column, or by the previous one."""
        self.query_one(Workers).sort_by_next(step)
        self.show()

    def action_reverse(self) -> None:
        workers = self.query_one(Workers)
        workers.sort_by(workers.by)
        self.show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.query_one(Workers).sort_by(str(event.column_key.value))
        self.show()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("open")
        field.focus()

    def on_input_submitted(self) -> None:
        """Return to the table; an empty filter disappears."""
        field = self.query_one("#filter", Input)
        field.set_class(bool(field.value), "open")
        self.query_one(Workers).focus()

    def action_theme(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the view of a worker, or of a group with its ranks."""
        name = str(event.row_key.value)
        if group := self.feed.model.groups.get(name):
            self.push_screen(GroupDetail(self.feed, group))
        elif worker := self.feed.model.workers.get(name):
            self.push_screen(Detail(self.feed, worker))


def run_screen(url: str, *, light: bool) -> None:
    """Run the app until the user quits. Raise StartupError if the service does not answer at first."""
    try:
        httpx.get(f"{url}/healthz", timeout=5, trust_env=False).raise_for_status()
    except httpx.HTTPError:
        raise no_suite(url) from None
    asyncio.run(Top(Feed(url), light=light).run_async())
