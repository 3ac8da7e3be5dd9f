"""The command `fulcrum top`: the cluster in a terminal."""

from typing import Annotated

import typer

from libs.cli.options import MetricsUrl, ReadyFile


def top(
    metrics: MetricsUrl = None,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print a snapshot a second, one JSON object a line.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    light: Annotated[bool, typer.Option("--light", help="Use colours for a light terminal.")] = False,
) -> None:
    """Watch prefill and decode live: ratio, pools, workers, alerts. Keys are in the footer."""
    from libs.cli.top.show import show_top  # noqa: PLC0415 (what only this command needs)

    show_top(ready, metrics=metrics, once=once, light=light, as_json=json)
