"""The table of workers in `fulcrum top`: as many columns as fit, in an order that keeps the cursor's place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rich.markup import escape
from rich.text import Text
from textual.binding import BindingType
from textual.widgets import DataTable

from libs.cli.top import draw
from libs.cli.top.model import FIGURE, WINDOW_NS, Row

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
    """The table, with a row for each worker; the footer says what Enter does."""

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
        """Sort by a column, or reverse the order if it is sorted by it already."""
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
            pointed = None  # in another order the first is what is looked for
        names, wide = [column.name for column in self.fitting], self.app.size.width >= HISTORY_WIDE
        rows = {worker.id: _cells(worker, last_ms, 20 if wide else 10) for worker in self._ordered(workers, last_ms)}
        if list(rows) != [str(key.value) for key in self.rows]:
            self._replace(rows, names, pointed)
            return
        for worker_id, row in rows.items():
            for name in names:
                if row[name] != self.get_cell(worker_id, name):  # each change has the table render all of its cells
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


def _cells(worker: Row, last_ms: int, history_cells: int) -> dict[str, Any]:
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
        "worker": Text(draw.shorten(worker.label, NAME_CELLS)), "role": escape(worker.role),
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
