"""One worker of `fulcrum top`, closer: its time, and its requests."""

from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from libs.cli.top import draw
from libs.cli.top.feed import Feed
from libs.cli.top.model import WorkerView
from libs.cli.top.requests import table

MAX_REQUESTS: Final = 100


class Detail(ModalScreen[None]):
    """One worker, closer, and its last requests; any of its keys goes back."""

    CSS = """
    Detail { align: center middle; }
    #box { width: 130; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: round $primary;
           background: $surface; }
    #requests { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape,enter,q", "dismiss", "back")]

    def __init__(self, feed: Feed, worker: WorkerView) -> None:
        super().__init__()
        self._feed = feed
        self._worker = worker

    def compose(self) -> ComposeResult:
        """A box over the table."""
        with VerticalScroll(id="box"):
            yield Static(id="detail")
            yield Static("requests: not known yet", id="requests")

    def on_mount(self) -> None:
        """Follow the worker for as long as it is looked at."""
        self.set_interval(draw.REFRESH_S, self._refresh)
        self.run_worker(self._follow_requests(), exit_on_error=True)
        self._refresh()

    async def _follow_requests(self) -> None:
        shown = self.query_one("#requests", Static)
        async for requests in self._feed.requests_of(self._worker.id, MAX_REQUESTS):
            shown.update(
                table(requests, self._worker.id) if requests else "no request of it has ended in the last minutes"
            )

    def _refresh(self) -> None:
        worker, last_ms = self._worker, self._feed.model.last_ms
        times = worker.spent(last_ms)
        text = Text.assemble(
            (f"{worker.id}", "bold"), f"  {worker.role} on {worker.node}, {worker.model}, {worker.gpus} GPUs\n\n",
            "30 s  ", draw.history(worker, last_ms, 60, 5), "\n",
            " 6 s  ", draw.history(worker, last_ms, 60, 1), "\n",
            " 2 s  ", draw.bar(times, 60), "\n\n",
        )  # fmt: skip
        for phase, spent in draw.parts(times).items():
            text.append(f"{phase} {draw.percent(spent, times[0])}   ", draw.COLORS[phase])
        text.append(
            f"\n\nrunning {worker.running}   waiting {worker.waiting}   prompt tokens to compute {worker.tokens:,}\n"
            f"KV held {draw.percent(worker.kv_used)}  MFU {draw.percent(worker.mfu)}  MBU {draw.percent(worker.mbu)}\n"
        )
        self.query_one("#detail", Static).update(text)
