"""The commands `fulcrum planner advice` and `fulcrum planner regret`."""

import json
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from libs.cli.console import make_console
from libs.cli.find import find_suite, get_json

# Decisions requested: as many as the planner keeps.
MOST: Final = 1_000
CAUSES: Final = {
    "late": "roles followed the work",
    "held": "workers rested, were pinned, or it was quiet",
    "limits": "limits",
    "advisory": "the planner might not act",
    "best": "the present split was taken for as good",
    "too_small": "no split of the workers had room",
}


def planner_advice(*, ready_file: Path | None, as_json: bool) -> None:
    """Print the advice, the newest first. Raises StartupError if there is no suite."""
    found: list[dict[str, Any]] = get_json(
        find_suite(ready_file).planner, "/v1/decisions", exact=as_json, limit=str(MOST)
    )
    advised = [each for each in found if each["advice"] is not None]
    if as_json:
        print(json.dumps(advised))
        return
    console = make_console()
    if not advised:
        console.print("Nothing is advised.")
    for each in advised:
        advice = each["advice"]
        console.print(f"{each['time'][11:19]}  {each['model']}: {each['reason']}", soft_wrap=True)
        expected = f"{advice['figure']} by {advice['low']:.3g} to {advice['high']:.3g}"
        came = f"; it came to {advice['came']:.3g}" if advice["outcome"] == "applied" else ""
        console.print(f"          expected: {expected}; {advice['outcome']}{came}")
        console.print(f"          {advice['command']}", style="cyan")


def planner_regret(window: str, *, ready_file: Path | None, as_json: bool) -> None:
    """Print the regret by cause. Raises StartupError if there is no suite."""
    found: dict[str, Any] = get_json(find_suite(ready_file).planner, "/v1/regret", exact=as_json, window=window)
    if as_json:
        print(json.dumps(found))
        return
    console = make_console()
    console.print(
        f"{found['lost_gpu_hours']:.2f} of {found['gpu_hours']:.2f} GPU-hours would have served more in another split"
        f" of roles (estimated, {found['method'].replace('_', ' ')}):"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    for cause, hours in sorted(found["by_cause"].items(), key=lambda each: -each[1]):
        table.add_row(f"{hours:.2f}", cause, CAUSES.get(cause, ""))
    console.print(table)
