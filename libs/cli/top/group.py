"""The view of one data-parallel group in `fulcrum top`: its time, and its ranks."""

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Static

from libs.cli.top import draw
from libs.cli.top.detail import Detail, figures
from libs.cli.top.feed import Feed
from libs.cli.top.model import GroupRow
from libs.cli.top.workers import Workers


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
        group = self._feed.model.groups.get(self._group.id, self._group)  # another object when ranks come or go
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
