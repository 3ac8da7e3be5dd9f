"""How `fulcrum up` shows on stderr what its processes do: bars on a terminal, lines elsewhere."""

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

ALMOST = 0.99
"""As far as a bar goes before its process is ready: the last stage may be done and the process not yet serving."""


class Display(Reporter, Protocol):
    """A reporter that can be asked to leave the screen as it is."""

    def finish(self) -> None:
        """The start is over, one way or the other; from here on only notes and restarts are shown."""
        ...


def make_display() -> Display:
    """By what stderr is."""
    console = make_console(stderr=True)
    return Bars(console) if console.is_terminal else Lines()


class Lines:
    """One line for each new stage and for each process that is ready."""

    def __init__(self) -> None:
        self._stage: dict[str, str] = {}
        self._starting = True

    def progress(self, name: str, stage: str, fraction: float) -> None:
        """A line when the stage is another."""
        if self._starting and self._stage.get(name) != stage:
            self._stage[name] = stage
            print(plain(f"{name}: {stage}"), file=sys.stderr, flush=True)

    def ready(self, name: str, address: str) -> None:
        """A line."""
        print(plain(f"{name}: ready {address}").rstrip(), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line."""
        print(plain(text, lines=True), file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Stages are no news any more."""
        self._starting = False


class _Mark(ProgressColumn):
    """A spinner that becomes a tick."""

    def __init__(self) -> None:
        super().__init__()
        self._spinner = SpinnerColumn()

    def render(self, task: Task) -> Text:
        """One cell."""
        if task.finished:
            return Text("✓", style="green")
        spinner = self._spinner.render(task)
        return spinner if isinstance(spinner, Text) else Text("•")


class Bars:
    """One bar for each process."""

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
        """Move the bar; without a known share it pulses."""
        if self._starting:
            total = 1.0 if fraction else None
            self._bars.update(self._task(name), stage=stage, total=total, completed=min(fraction, ALMOST))

    def ready(self, name: str, address: str) -> None:
        """Fill the bar."""
        if self._starting:
            self._bars.update(self._task(name), stage=address or "ready", total=1.0, completed=1.0)
        else:
            self._console.print(f"{name} is back at {address}" if address else f"{name} is back", style="green")

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, style="yellow")

    def finish(self) -> None:
        """Leave the bars as they are."""
        self._starting = False
        self._bars.stop()

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", total=None, name=name, stage="")
        return self._tasks[name]
