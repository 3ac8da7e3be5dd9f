"""Progress of `fulcrum up` on stderr: bars on a terminal, lines elsewhere."""

import sys
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from libs.cli.console import make_console
from libs.contracts.foreign_text import plain
from libs.launch.report import Reporter

# A bar stops here until its process serves, even if the last stage is complete.
ALMOST = 0.99


class Display(Reporter, Protocol):
    """A reporter that can leave the screen as it is."""

    def finish(self) -> None:
        """End the start's display; from here on only notes and restarts are shown."""
        ...


def make_display() -> Display:
    """Return the display that suits stderr."""
    console = make_console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()


class Lines:
    """A display with one line for each new stage and for each process that is ready."""

    def __init__(self) -> None:
        self._stage: dict[str, str] = {}
        self._starting = True

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """Print a line if the stage has changed."""
        if self._starting and self._stage.get(name) != stage:
            self._stage[name] = stage
            print(plain(f"{name}: {stage}"), file=sys.stderr, flush=True)

    def ready(self, name: str, address: str) -> None:
        print(plain(f"{name}: ready {address}").rstrip(), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(plain(text, lines=True), file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Stop printing stages."""
        self._starting = False


class _Mark(ProgressColumn):
    """A spinner that becomes a tick once its task is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._spinner = SpinnerColumn()

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("✓", style="green")
        spinner = self._spinner.render(task)
        return spinner if isinstance(spinner, Text) else Text("•")


class Bars:
    """A display with one bar for each process."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            _Mark(),
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._starting = True
        self._bars.start()

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """Move the bar; it pulses if the fraction is unknown."""
        if self._starting:
            total = 1.0 if fraction else None
            self._bars.update(self._task(name), stage=stage, total=total, completed=min(fraction, ALMOST))

    def ready(self, name: str, address: str) -> None:
        if self._starting:
            self._bars.update(self._task(name), stage=address or "ready", total=1.0, completed=1.0)
        else:
            self._console.print(f"{name} is back at {address}" if address else f"{name} is back", style="green")

    def note(self, text: str) -> None:
        self._console.print(text, style="yellow")

    def finish(self) -> None:
        self._starting = False
        self._bars.stop()

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=None, name=name, stage="")
        return self._tasks[name]
