"""What `fulcrum workers` and `fulcrum occupancy` print."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from libs.cli.find import find_suite, get_json

BAR_CELLS = 24
BEHIND_MS = 2_000
"""Data that are older are not shown without saying so."""
PIPE_COLUMNS = 200
"""Where there is no terminal to fit into."""
ROLE_STYLES = {"prefill": "cyan", "decode": "green", "mixed": "yellow", "standby": "dim"}
PHASES = {"prefill": ("█", "cyan"), "decode": ("▓", "green"), "kv_wait": ("▒", "yellow"), "idle": ("·", "grey37")}
"""Cell and style of each; the cells differ, since not every output has colours."""


def show_workers(ready_file: Path | None, *, as_json: bool) -> None:
    """Print the planner's list. Raises StartupError when there is no suite."""
    workers: list[dict[str, Any]] = get_json(find_suite(ready_file).planner, "/v1/workers")
    if as_json:
        print(json.dumps(workers))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("worker", "role", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("run", "wait", "epoch", "moves"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("last move", no_wrap=True)
    table.add_column("model")
    for title in ("device", "address"):
        table.add_column(title, no_wrap=True)
    now_ns = time.time_ns()
    for worker in workers:
        budget = f" +{worker['budget_tokens']}" if worker["budget_tokens"] else ""
        engine, device = worker["engine"], worker["device"]
        table.add_row(
            worker["id"],
            Text(worker["role"] + budget, style=ROLE_STYLES.get(worker["role"], "")),
            Text(worker["state"], style="green" if worker["state"] == "ready" else "yellow"),
            str(worker["running"]),
            str(worker["waiting"]),
            str(worker["epoch"]),
            str(worker["moves"] or "–"),
            last_move(worker, now_ns),
            worker["model"],
            device if device.startswith(engine) else f"{engine} {device}",
            worker["address"],
        )
    console = _console()
    console.print(table if workers else "No worker is registered.")
    for worker in workers:
        if worker["unpaired"]:
            console.print(f"{worker['id']} {worker['unpaired']}", style="yellow", markup=False)


def show_occupancy(ready_file: Path | None, window: str, *, as_json: bool) -> None:
    """Print the metrics service's figures. Raises StartupError when there is no suite, or no such window."""
    found: dict[str, Any] = get_json(find_suite(ready_file).metrics, "/v1/occupancy", window=window)
    if as_json:
        print(json.dumps(found))
        return
    show_occupancy_of(found)


def show_occupancy_of(found: dict[str, Any]) -> None:
    """Print what `/v1/occupancy` answered."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column(f"last {found['window_ms'] / 1000:g} s", no_wrap=True)
    for title in (*map(_title, PHASES), "P:D", "covered"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(Text("all", style="bold"), *_cells(found))
    for worker in found["workers"]:
        table.add_row(f"{worker['id']}", *_cells(worker))
    legend = Text(" ").join(Text(f"{cell} {_title(phase)}", style=style) for phase, (cell, style) in PHASES.items())
    _console().print(Group(table, Text(), legend, *_age(found["age_ms"])))


def _age(age_ms: int | None) -> Iterator[Text]:
    """How old the data are; nothing without any worker."""
    if age_ms is not None:
        behind = age_ms > BEHIND_MS
        yield Text(f"{age_ms / 1000:.1f} s {'behind' if behind else 'old'}", style="bold red" if behind else "dim")


def last_move(worker: dict[str, Any], now_ns: int) -> Text:
    """How long ago a worker took its role, and who gave it."""
    if not worker["moved_unix_ns"]:
        return Text("–", style="dim")
    age_s = max(now_ns - worker["moved_unix_ns"], 0) // 1_000_000_000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if age_s >= size or size == 1:
            return Text(f"{age_s // size}{unit} ago, {worker['moved_by'] or 'unnamed'}")
    raise AssertionError("a second is the smallest unit")


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _title(phase: str) -> str:
    return phase.replace("_", " ")


def _cells(figures: dict[str, Any]) -> list[Text | str]:
    shares = [_percent(figures[phase]) for phase in PHASES]
    ratio = "–" if figures["ratio"] is None else f"{figures['ratio']:.2f}"
    return [phase_bar(figures), *shares, ratio, _percent(figures["coverage"])]


def phase_bar(figures: dict[str, Any]) -> Text:
    """The phases side by side; cells are dealt by largest remainder, so that they always fill the bar."""
    if figures["idle"] is None:
        return Text("no telemetry".ljust(BAR_CELLS), style="dim")
    exact = {phase: figures[phase] * BAR_CELLS for phase in PHASES}
    cells = {phase: int(value) for phase, value in exact.items()}
    by_remainder = sorted(PHASES, key=lambda phase: exact[phase] - cells[phase], reverse=True)
    for phase in by_remainder[: BAR_CELLS - sum(cells.values())]:
        cells[phase] += 1
    return Text.assemble(*((cell * cells[phase], style) for phase, (cell, style) in PHASES.items()))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
