"""The run of `fulcrum up` in a terminal: signals, progress of the start, the first question, the screen."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec
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
from libs.cli.find import remember
from libs.cli.suite.chat import ChatAnswer, ask
from libs.contracts.errors import StartupError
from libs.contracts.foreign_text import plain
from libs.launch.options import LaunchSettings, SuiteOptions
from libs.launch.processes.port import Reporter
from libs.launch.profile import load_profile
from libs.launch.ready import DEFAULT_GATEWAY_PORT, Ready, default_ready_file, logs_folder
from libs.launch.up import Up
from libs.runtime.service import configure_logging
from libs.runtime.settings import load_settings

# The progress at which a bar stops until its process serves, even if the last stage is complete.
ALMOST = 0.99


class Display(Reporter, Protocol):
    """A reporter on a terminal, whose display of the start can end."""

    def finish(self) -> None:
        """End the start's display; from now on only notes and restarts are shown."""
        ...


def make_display() -> Display:
    """Return a live display if stderr is a terminal, else one that prints lines."""
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


FIRST_QUESTION = "What is the capital of France?"
FIRST_ANSWER_TOKENS = 48
EXIT_OK = 0
EXIT_STOPPED_EARLY = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(options: SuiteOptions, model: str | None, *, question: bool, as_json: bool) -> int:
    """Serve until a signal and return the exit code. Raise StartupError if it cannot start or ends by itself."""
    settings = load_settings(LaunchSettings)
    configure_logging("up", level="warning", log_format="console")
    if options.profile is not None and model is None:
        model = load_profile(options.profile).model
    display = make_display()
    run = _Run(Up(options, model, settings, display), display, options, question=question, as_json=as_json)
    try:
        return asyncio.run(run.main())
    finally:
        display.finish()


class _Run:
    """One `fulcrum up` as shown in the terminal."""

    def __init__(self, up: Up, display: Display, options: SuiteOptions, *, question: bool, as_json: bool) -> None:
        self._up = up
        self._display = display
        self._options = options
        self._question = question
        self._as_json = as_json
        self._served = False
        self._stopping = False
        # With --json, stdout is reserved for the one value.
        self._out = make_console(stderr=as_json, soft_wrap=True)

    async def main(self) -> int:
        """Run until a signal or a StartupError."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._up.run(self._on_ready), name="up")
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop, work)
        try:
            await work
        except asyncio.CancelledError:
            self._display.note("stopped")
            return EXIT_OK if self._served else EXIT_STOPPED_EARLY
        return EXIT_OK

    def _stop(self, work: "asyncio.Task[Any]") -> None:
        """Drain at the first signal; do not wait at the second."""
        if self._stopping:
            self._up.kill()
            return
        self._stopping = True
        self._display.finish()
        self._display.note("stopping: requests may finish, a second signal ends them")
        work.cancel()

    async def _on_ready(self, ready: Ready) -> None:
        self._served = True
        self._display.finish()
        self._show(ready)
        if self._as_json:
            print(msgspec.json.encode(ready).decode(), flush=True)
        if self._question:
            await self._ask(ready)
        self._out.print("\nCtrl-C stops it. In another terminal:", style="dim")
        if ready.gateway_port != DEFAULT_GATEWAY_PORT:
            self._out.print(f"  export FULCRUM_READY={self._ready_file(ready)}")
        for command in ('chat "Why is the sky blue?"', "workers", "top", "planner decisions --follow"):
            self._out.print(f"  {_program()} {command}")

    def _show(self, ready: Ready) -> None:
        rows = [
            ("gateway" if number == 1 else f"gateway {number}", gateway, "OpenAI's API at /v1, described at /docs")
            for number, gateway in enumerate(ready.gateways, start=1)
        ]
        rows.append(("planner", ready.planner, "moves workers to where work presses; /v1/workers, /v1/decisions"))
        rows.append(("metrics", ready.metrics, "the cluster live, in a browser; /v1/occupancy, /metrics"))
        self._out.print(
            Text.assemble("\n", (f"Fulcrum serves {self._served_models(ready)}", "bold"), f" ({ready.engine})")
        )
        for name, url, what in rows:
            self._out.print(Text.assemble(f"  {name:<11}{url}  ", (what, "dim")))
        self._out.print(f"  {'logs':<11}{logs_folder(ready.gateway_port)}")

    def _served_models(self, ready: Ready) -> str:
        pool = self._options.pool
        if not pool:
            return ready.model
        names = self._options.models or (ready.model,)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{shown} on {pool} worker{'s' if pool > 1 else ''}"

    async def _ask(self, ready: Ready) -> None:
        """Ask the first question. A failure is reported, and the suite stays up to be examined."""
        self._out.print(f"\n{FIRST_QUESTION}", style="bold")
        body = {
            "model": ready.model,
            "messages": [{"role": "user", "content": FIRST_QUESTION}],
            "max_tokens": FIRST_ANSWER_TOKENS,
            "temperature": 0,
        }
        answer = ChatAnswer()
        try:
            async for piece in ask(remember(ready).gateway, body, answer):
                self._out.print(piece, end="")
        except StartupError as error:
            self._display.note(f"the first question failed: {error.message}")
            return
        self._out.print()
        self._out.print(answer.served_by(), style="dim")

    def _ready_file(self, ready: Ready) -> str:
        return str(self._options.json_ready or default_ready_file(ready.gateway_port))


def _program() -> str:
    """Return the program as typed, for commands that are printed."""
    called = Path(sys.argv[0])
    if called.name != "fulcrum" or shutil.which("fulcrum") == str(called):
        return "fulcrum"
    return os.path.relpath(called) if called.is_relative_to(Path.cwd()) else str(called)
