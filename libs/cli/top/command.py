"""`fulcrum top`: the cluster in a terminal."""

from typing import Annotated

import typer

from libs.cli.options import ReadyFile

EPILOG = "Example: fulcrum top --metrics http://HOST:8002, or for pipes: fulcrum top --json | jq .ratio"


def top(
    metrics: Annotated[
        str | None, typer.Option(metavar="URL", help="Metrics service to look at; else that of the running suite.")
    ] = None,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print a snapshot a second, one JSON object a line.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    light: Annotated[bool, typer.Option("--light", help="For a light terminal.")] = False,
) -> None:
    """Watch prefill and decode live: ratio, pools, workers, alerts. Keys are in the footer."""
    from libs.cli.find import find_suite  # noqa: PLC0415 (what only this command needs)
    from libs.cli.top.plain import print_snapshots  # noqa: PLC0415

    url = metrics.rstrip("/") if metrics else find_suite(ready).metrics
    if json or once:
        print_snapshots(url, as_json=json, once=once)
        return
    from libs.cli.top.screen import run_screen  # noqa: PLC0415

    run_screen(url, light=light)
