"""The output of `fulcrum workers` and `fulcrum occupancy`."""

import json
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_suite, get_json
from libs.cli.status.answer import STATUS_PATH, WorkerLifeAnswer, parse_status
from libs.cli.status.show import span, workers_line
from libs.contracts.errors import StartupError

BAR_CELLS = 24
# Older data are shown with their age.
BEHIND_MS = 2_000
ROLE_STYLES = {"prefill": "cyan", "decode": "green", "mixed": "yellow", "standby": "dim"}
PHASES = {"prefill": ("█", "cyan"), "decode": ("▓", "green"), "kv_wait": ("▒", "yellow"), "idle": ("·", "grey37")}
"""The cell and style of each phase. The cells differ because not every output has colours."""


def show_workers(ready_file: Path | None, *, as_json: bool) -> None:
    """Print the planner's list of workers. Raise StartupError if there is no suite."""
    workers: list[dict[str, Any]] = get_json(find_suite(ready_file).planner, "/v1/workers", exact=as_json)
    if as_json:
        print(json.dumps(workers))
        return
    titles = ("worker", "role", "state", "run", "wait", "up", "pid", "epoch", "moves", "last move", "model", "device")
    left = ("worker", "role", "state", "last move", "model", "device", "address")
    table = plain_table(*titles, "address", left=left, wraps=("model",), gap=1)
    now_ns = time.time_ns()
    for worker in workers:
        budget = f" +{worker['budget_tokens']}" if worker["budget_tokens"] else ""
        engine, device = worker["engine"], worker["device"]
        table.add_row(
            worker["id"],
            Text(worker["role"] + budget, style=ROLE_STYLES.get(worker["role"], "")),
            life_text(worker, now_ns // 1_000_000),
            *(Text("–", "dim") if worker[name] is None else str(worker[name]) for name in ("running", "waiting")),
            span((now_ns - worker["started_unix_ns"]) / 1e6),
            str(worker["pid"]),
            str(worker["epoch"]),
            str(worker["moves"] or "–"),
            last_move(worker, now_ns),
            worker["model"],
            device if device.startswith(engine) else f"{engine} {device}",
            worker["address"],
        )
    console = make_console()
    console.print(table if workers else "No worker is registered.")
    listed = {worker["id"] for worker in workers}
    if unlisted := [each for each in _silent(ready_file) if each.id not in listed]:
        console.print(workers_line(unlisted, now_ns // 1_000_000).append("; no longer registered"))
    for worker in workers:
        if worker["unpaired"]:
            console.print(f"{worker['id']} {worker['unpaired']}", style="yellow")


def life_text(worker: dict[str, Any], now_ms: int) -> Text:
    """Return a worker's state: what it registered while it runs and is not ready, otherwise as in `fulcrum status`."""
    life = worker.get("life", "running")  # missing in answers of an older planner
    if life in ("running", "starting"):
        state = worker["state"] if worker["state"] != "ready" else life
        return Text(state, style="green" if state == "running" else "yellow")
    return Text(f"{life} {span(now_ms - worker['life_since_unix_ms'])}", style="red" if life == "silent" else "yellow")


def _silent(ready_file: Path | None) -> list[WorkerLifeAnswer]:
    """Return the silent workers, whose lease may have run out; none if the metrics service does not answer."""
    try:
        status = parse_status(get_json(find_suite(ready_file).metrics, STATUS_PATH))
    except StartupError:
        return []
    return [each for each in status.workers if each.life == "silent"]


def show_occupancy(ready_file: Path | None, window: str, *, as_json: bool) -> None:
    """Print the metrics service's figures. Raise StartupError if there is no suite or no such window."""
    found: dict[str, Any] = get_json(find_suite(ready_file).metrics, "/v1/occupancy", exact=as_json, window=window)
    if as_json:
        print(json.dumps(found))
        return
    show_occupancy_of(found)


def show_occupancy_of(found: dict[str, Any]) -> None:
    window = f"last {found['window_ms'] / 1000:g} s"
    dummies = any(worker.get("dummy_steps") for worker in found["workers"])
    encodes = bool(found.get("encode_gpu_ns"))
    ratio = "E:P:D" if encodes else "P:D"
    columns = [*map(_title, PHASES), *(["of it dummy"] if dummies else []), ratio, "covered"]
    table = plain_table("", window, *columns, left=("", window), gap=1)
    for name, figures in _rows(found):
        table.add_row(name, *_cells(figures, dummies=dummies, encodes=encodes))
    legend = Text(" ").join(Text(f"{cell} {_title(phase)}", style=style) for phase, (cell, style) in PHASES.items())
    make_console().print(Group(table, Text(), legend, *_estimated(found), *_age(found["age_ms"])))


def _estimated(found: dict[str, Any]) -> Iterator[Text]:
    """Yield that the shares are estimates, with the bounds of each worker's; nothing if they are measured."""
    if not found.get("estimate"):
        return
    yield Text("Estimated from the servers' own metrics. Prefill of busy time, and its bounds:", style="yellow")
    known = [
        (each["id"], each["estimate"])
        for each in found["workers"]
        if (each.get("estimate") or {}).get("low") is not None
    ]
    for name, share in [("all", found["estimate"]), *known]:
        if share["low"] is not None:
            yield Text(f"  {name}: {share['prefill']:.0%} ({share['low']:.0%} to {share['high']:.0%})", style="dim")


def _rows(found: dict[str, Any]) -> Iterator[tuple[Text, dict[str, Any]]]:
    """Yield the cluster, then workers and data-parallel groups by name, each group above its ranks.

    The answer of an older service has no groups.
    """
    yield Text("all", style="bold"), found
    workers = {worker["id"]: worker for worker in found["workers"]}
    rows = [(worker["id"], worker) for worker in found["workers"] if not worker.get("group")]
    rows += [(f"{group['group']} ×{len(group['ranks'])}", group) for group in found.get("groups", ())]
    for name, figures in sorted(rows, key=itemgetter(0)):
        yield Text(name), figures
        for rank in figures.get("ranks", ()):
            yield Text(f"  {rank}", style="dim"), workers[rank]


def _age(age_ms: int | None) -> Iterator[Text]:
    """Yield how old the data are; nothing without workers."""
    if age_ms is not None:
        behind = age_ms > BEHIND_MS
        yield Text(f"{age_ms / 1000:.1f} s {'behind' if behind else 'old'}", style="bold red" if behind else "dim")


def last_move(worker: dict[str, Any], now_ns: int) -> Text:
    """Return how long ago a worker took its role, and who gave it."""
    if not worker["moved_unix_ns"]:
        return Text("–", style="dim")
    return Text(f"{span((now_ns - worker['moved_unix_ns']) / 1e6)} ago, {worker['moved_by'] or 'unnamed'}")


def _title(phase: str) -> str:
    return phase.replace("_", " ")


def _cells(figures: dict[str, Any], *, dummies: bool = False, encodes: bool = False) -> list[Text | str]:
    shares = [_percent(figures[phase]) for phase in PHASES]
    shares += [_percent(figures["dummy"])] if dummies else []
    # A single phase has no ratio.
    ratio = f"{figures['ratio']:.2f}" if figures["ratio"] and figures["prefill"] else ""
    if encodes:
        ratio = _with_encode(figures)
    return [phase_bar(figures), *shares, ratio, _percent(figures["coverage"])]


def _with_encode(figures: dict[str, Any]) -> str:
    """Return encode : prefill without it : decode, relative to decode, or to prefill where nothing is decoded.

    "?" means an unknown time of encoding, which is then part of prefill.
    """
    encode = figures.get("encode_gpu_ns")
    prefill, decode = figures["gpu_ns"]["prefill"] - (encode or 0), figures["gpu_ns"]["decode"]
    one = decode or prefill
    if not one:
        return ""
    times = (encode, prefill, decode)
    return ":".join("?" if each is None else f"{each / one:.2f}".removesuffix(".00") for each in times)


def phase_bar(figures: dict[str, Any]) -> Text:
    """Return the phases side by side. Cells are dealt by largest remainder, so they always fill the bar."""
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
