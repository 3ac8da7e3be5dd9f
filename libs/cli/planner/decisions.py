"""The commands `fulcrum planner status`, `decisions` and `explain`."""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from libs.cli.console import make_console, plain_table
from libs.cli.find import find_suite, get_json
from libs.contracts.errors import StartupError

POLL_S: Final = 0.25
# Decisions requested at first: as many as the planner keeps.
MOST: Final = 1_000
# Decisions requested at each poll while following: more than are made between two.
AT_ONCE: Final = 50
# The kinds whose measured effect is published later.
MEASURED: Final = ("set_role", "set_budget")
PRESSES: Final = 1.0
STYLES: Final = {
    "set_role": "bold cyan",
    "set_budget": "cyan",
    "recommend": "yellow",
    "scale": "bold magenta",
    "role_moved": "green",
    "set_mode": "magenta",
    "set_limits": "magenta",
}


def planner_status(*, ready_file: Path | None, as_json: bool) -> None:
    """Print the planner's state. Raises StartupError if there is no suite."""
    base_url = find_suite(ready_file).planner
    found: dict[str, Any] = get_json(base_url, "/v1/planner", exact=as_json)
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    leads = {"ours": "", "anothers": ", another planner leads", "unknown": ", nobody knows who leads"}[found["lead"]]
    moved = found["decisions"].get("set_role", 0)
    console.print(f"{found['planner_id']} is in mode {found['mode']}{leads}; {moved} decisions changed roles.")
    if found["not_live"]:
        console.print(found["not_live"], style="yellow")
    titles = ("model", "prefill", "pressure", "decode", "pressure", "prompts wait", "")
    table = plain_table(*titles, left=("model", ""), wraps=("",))
    for each in found["models"]:
        table.add_row(each["model"], *_stands(each))
    console.print(table if found["models"] else "No worker is registered.")
    for each in get_json(base_url, "/v1/decisions", limit=str(AT_ONCE)):
        if each["action"] != "keep" and not _seen_of_its_own(each):
            console.print(Text("Last: "), _line(each), soft_wrap=True)
            return


def planner_decisions(limit: int, *, follow: bool, keeps: bool, ready_file: Path | None, as_json: bool) -> None:
    """Print the last decisions, and with `follow` new ones until interrupted."""
    base_url, console = find_suite(ready_file).planner, make_console()
    first = _wanted(get_json(base_url, "/v1/decisions", exact=as_json, limit=str(MOST)), keeps=keeps)[:limit]
    shown = _Shown(as_json=as_json)
    for each in reversed(first):
        _print(console, each, as_json=as_json)
        shown.is_news(each)
    if not first and not as_json and not follow:
        console.print("Nothing was decided that changes a worker. --keeps shows why not.")
    while follow:
        time.sleep(POLL_S)
        try:
            reported = get_json(base_url, "/v1/decisions", exact=as_json, limit=str(AT_ONCE))
        except StartupError:  # the planner is being started again
            continue
        for each in reversed(_wanted(reported, keeps=keeps)):
            if shown.is_news(each):
                _print(console, each, as_json=as_json)


class _Shown:
    """The decisions already printed: the newest one, and those whose measured effect is still to come."""

    def __init__(self, *, as_json: bool) -> None:
        self._newest = (0, 0)
        self._as_json = as_json
        self._unmeasured: set[str] = set()

    def is_news(self, decision: dict[str, Any]) -> bool:
        """Return whether a decision has not been printed yet, and mark it as printed."""
        place = decision["decided_unix_ns"], decision["sequence"]
        newer = place > self._newest
        measured = decision["measured"] is not None
        again = self._as_json and measured and decision["id"] in self._unmeasured
        self._newest = max(self._newest, place)
        if newer and not measured and decision["action"] in MEASURED:
            self._unmeasured.add(decision["id"])
        elif again:
            self._unmeasured.discard(decision["id"])
        return newer or again


def _print(console: Console, decision: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(decision), flush=True)
    else:
        console.print(_line(decision), soft_wrap=True)


def planner_explain(decision: str, *, lab: bool, ready_file: Path | None, as_json: bool) -> None:
    """Print one decision, with `lab` beside its replay. Raises StartupError if the planner no longer has it."""
    path = f"/v1/decisions/{quote(decision, safe='')}"
    found: dict[str, Any] = get_json(find_suite(ready_file).planner, path, exact=as_json)
    replayed = None
    if lab:
        from libs.cli.planner.in_lab import replayed_in_lab  # noqa: PLC0415 (what only this option needs)

        replayed = replayed_in_lab(found, ready_file)
    if as_json:
        print(json.dumps(found if replayed is None else {**found, "lab": replayed}))
        return
    console = make_console()
    console.print(_line(found), soft_wrap=True)
    for each in found["changes"]:
        budget = f", {each['budget_tokens']} prompt tokens a step" if each["budget_tokens"] else ""
        console.print(f"  {each['worker']}: {each['role']}{budget}")
    if found["candidates"]:
        console.print("\nWeighed, the chosen one first:" if found["predicted"] else "\nWeighed, the present one first:")
        console.print(_candidates(found["candidates"]))
    if found["counterfactual"]:
        console.print(_counterfactual(found["counterfactual"]))
    if found["measured"]:
        console.print(
            f"\nSeen before, and {found['measured']['after_ms'] / 1000:.1f} s after (other things happened too):"
        )
        console.print(_seen(found["measured"]))
    if replayed is not None:
        console.print(_in_lab(replayed))


def _wanted(decisions: Iterable[dict[str, Any]], *, keeps: bool) -> list[dict[str, Any]]:
    return [each for each in decisions if keeps or not (each["action"] == "keep" or _seen_of_its_own(each))]


def _seen_of_its_own(decision: dict[str, Any]) -> bool:
    """Return whether the record only says that a worker has carried out this planner's own decision."""
    return bool(decision["action"] == "role_moved" and decision["actor"] == decision["planner_id"])


def _line(decision: dict[str, Any]) -> Text:
    action = decision["action"]
    clock = decision["time"][11:23]
    named = ", ".join(decision["workers"][:4]) + ("…" if len(decision["workers"]) > 4 else "")
    return Text.assemble(
        (f"{decision['sequence']:>6} ", "dim"),
        (f"{clock}  ", "dim"),
        (f"{action:<10} ", STYLES.get(action, "dim")),
        (f"{named}: " if named else "", "bold"),
        decision["reason"],
    )


def _stands(model: dict[str, Any]) -> Iterator[Text | str]:
    now = model["now"]
    if now is None:
        yield from ("", "", "", "", "", Text(model["unknown"], style="yellow"))
        return
    yield str(now["prefill"])
    yield _pressure(now["prompt_pressure"])
    yield str(now["decode"])
    yield _pressure(now["decode_pressure"])
    yield f"{now['waiting_ms'] / 1000:.1f} s"
    pinned = f"; pinned: {', '.join(model['pinned'])}" if model["pinned"] else ""
    yield f"{model['code'].replace('_', ' ')}{pinned}"


def _candidates(candidates: list[dict[str, Any]]) -> Table:
    table = plain_table("prefill", "decode", "prompts press", "decodes press", "TTFT", "TPOT", "served in time")
    for number, each in enumerate(candidates):
        table.add_row(
            str(each["prefill"]),
            str(each["decode"]),
            _pressure(each["prompt_pressure"]),
            _pressure(each["decode_pressure"]),
            f"{each['ttft_ms'] / 1000:.2f} s",
            f"{each['tpot_ms']:.0f} ms",
            f"{each['served']:.0%}",
            style="bold" if number == 0 else "",
        )
    return table


def _seen(measured: dict[str, Any]) -> Table:
    table = plain_table("", "prefill", "decode", "prompts press", "decodes press", "prompts wait", "decodes")
    for name in ("before", "after"):
        each = measured[name]
        table.add_row(
            name,
            str(each["prefill"]),
            str(each["decode"]),
            _pressure(each["prompt_pressure"]),
            _pressure(each["decode_pressure"]),
            f"{each['waiting_ms'] / 1000:.1f} s",
            str(each["decodes"]),
        )
    return table


def _counterfactual(found: dict[str, Any]) -> str:
    without, with_it = found["without"], found["with_it"]
    return (
        f"\nThe demand of the {found['over_ms'] / 1000:.1f} s after it, without it and with it (closed form, not"
        f" simulated): TTFT {without['ttft_ms'] / 1000:.2f} and {with_it['ttft_ms'] / 1000:.2f} s, served in time"
        f" {without['served']:.0%} and {with_it['served']:.0%}"
    )


def _in_lab(found: dict[str, Any]) -> Table:
    table = plain_table("in the lab", "requests", "in time", "TTFT mean", "p90", "TPOT mean", left=("in the lab",))
    for name, lived in (("without it", found["without"]), ("with it", found["with_it"])):
        ttft_ms, tpot_ms = lived["ttft_ms"], lived["tpot_ms"]
        table.add_row(
            name,
            str(lived["requests"]),
            f"{lived['good']:.0%}",
            f"{ttft_ms.get('mean', 0) / 1000:.2f} s",
            f"{ttft_ms.get('p90', 0) / 1000:.2f} s",
            f"{tpot_ms.get('mean', 0):.0f} ms",
        )
    return table


def _pressure(value: float) -> Text:
    return Text(f"{value:.2f}", style="bold red" if value > PRESSES else "")
