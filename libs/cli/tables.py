"""What `fulcrum workers` and `fulcrum occupancy` print."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from libs.cli.find import find_suite, get_json

BAR_CELLS = 40
PHASES = {"prefill": "cyan", "decode": "green", "kv_wait": "yellow", "idle": "grey37"}


def show_workers(ready_file: Path | None, *, as_json: bool) -> None:
    """Print the planner's list. Raises StartupError when there is no suite."""
    workers: list[dict[str, Any]] = get_json(find_suite(ready_file).planner, "/v1/workers")
    if as_json:
        print(json.dumps(workers))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("worker", "role", "state", "model", "engine", "address"):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting"):
        table.add_column(title, justify="right")
    for worker in workers:
        budget = f" +{worker['budget_tokens']}" if worker["role"] == "mixed" else ""
        engine = f"{worker['engine']} on {worker['device']}"
        state = Text(worker["state"], style="green" if worker["state"] == "ready" else "yellow")
        table.add_row(
            worker["id"], worker["role"] + budget, state, worker["model"], engine, worker["address"],
            str(worker["running"]), str(worker["waiting"]),
        )  # fmt: skip
    Console(highlight=False).print(table if workers else "No worker is registered.")


def show_occupancy(ready_file: Path | None, window: str, *, as_json: bool) -> None:
    """Print the metrics service's figures. Raises StartupError when there is no suite, or no such window."""
    found: dict[str, Any] = get_json(find_suite(ready_file).metrics, "/v1/occupancy", window=window)
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column(f"last {found['window_ms']} ms", no_wrap=True)
    for phase in PHASES:
        table.add_column(phase.replace("_", " "), justify="right")
    table.add_column("P:D", justify="right")
    table.add_column("covered", justify="right")
    table.add_row(Text("all", style="bold"), *_cells(found))
    for worker in found["workers"]:
        table.add_row(f"{worker['id']}", *_cells(worker))
    legend = Text(" ").join(Text(f"█ {phase.replace('_', ' ')}", style=style) for phase, style in PHASES.items())
    Console(highlight=False).print(Group(table, Text(), legend))


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
    return Text.assemble(*(("█" * count, PHASES[phase]) for phase, count in cells.items()))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
