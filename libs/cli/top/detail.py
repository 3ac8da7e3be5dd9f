"""The view of one worker in `fulcrum top`: its time, and its requests or the engine steps behind it."""

from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from libs.cli.top import draw
from libs.cli.top.feed import Feed, NotShown
from libs.cli.top.lists import request_table, step_table
from libs.cli.top.model import Row, WorkerRow

MAX_REQUESTS: Final = 100
STEPS_WINDOW: Final = "1s"


class Detail(ModalScreen[None]):
    """The screen of one worker, with its last requests or steps."""

    CSS = """
    Detail { align: center middle; }
    #box { width: 130; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: round $primary;
           background: $surface; }
    #list { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,q", "dismiss", "back"), ("s", "steps", "steps")]

    def __init__(self, feed: Feed, worker: WorkerRow) -> None:
        super().__init__()
        self._feed = feed
        self._worker = worker
        self._steps = False
        """True if steps are shown instead of requests."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box"):
            yield Static(id="detail")
            yield Static(id="list")

    def on_mount(self) -> None:
        """Follow the worker while the screen is open."""
        self.set_interval(draw.REFRESH_S, self._refresh)
        self._follow()
        self._refresh()

    def action_steps(self) -> None:
        self._steps = not self._steps
        self._follow()
        self._refresh()

    def _follow(self) -> None:
        shown = self.query_one("#list", Static)
        shown.update(f"{'steps' if self._steps else 'requests'}: not known yet")
        follow = self._follow_steps(shown) if self._steps else self._follow_requests(shown)
        self.run_worker(follow, group="list", exclusive=True, exit_on_error=True)

    async def _follow_requests(self, shown: Static) -> None:
        none = "no request of it has ended in the last minutes"
        async for reported in self._feed.requests_of(self._worker.id, MAX_REQUESTS):
            if isinstance(reported, NotShown):
                shown.update(Text(reported.message))
            else:
                shown.update(request_table(reported, self._worker.id, self.size.width) if reported else none)

    async def _follow_steps(self, shown: Static) -> None:
        async for reported in self._feed.steps_of(self._worker.id, STEPS_WINDOW):
            if isinstance(reported, NotShown):
                shown.update(Text(reported.message))
            else:
                shown.update(step_table(reported) if reported else f"no step in the last {STEPS_WINDOW}")

    def _refresh(self) -> None:
        worker = self._worker
        rank = f", a rank of {worker.group}" if worker.group else ""
        text = Text.assemble(
            (worker.id, "bold"), f"  {worker.role} on {worker.node}, {worker.model}, {worker.gpus} GPUs{rank}\n\n"
        )
        text.append_text(figures(worker, self._feed.model.last_ms))
        shown, other = ("steps of the last second", "requests") if self._steps else ("requests", "steps")
        text.append(f"\n{shown}   (s: {other})", "bold")
        self.query_one("#detail", Static).update(text)


def figures(row: Row, last_ms: int) -> Text:
    """Return time, queue depths and other figures of a worker or a group."""
    times = row.spent(last_ms)
    text = Text.assemble(
        "30 s  ", draw.history(row, last_ms, 60, 5), "\n",
        " 6 s  ", draw.history(row, last_ms, 60, 1), "\n",
        " 2 s  ", draw.bar(times, 60), "\n\n",
    )  # fmt: skip
    for phase, spent in draw.parts(times).items():
        text.append(f"{phase.replace('kv', 'KV')} {draw.percent(spent, times[0])}   ", draw.COLORS[phase])
    if row.dummy:
        text.append(f"(of it dummy steps {draw.percent(row.dummy)})", draw.COLORS["idle"])
    if isinstance(row, WorkerRow) and row.encode:
        text.append(f"(of prefill images {draw.percent(row.encode)})", draw.COLORS["prefill"])
    text.append(
        f"\n\nrunning {row.running}   waiting {row.waiting}   prompt tokens to compute {row.tokens:,}\n"
        f"KV held {draw.percent(row.kv_used)}  MFU {draw.percent(row.mfu)}  MBU {draw.percent(row.mbu)}\n"
    )
    return text
