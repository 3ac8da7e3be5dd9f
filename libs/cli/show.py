"""The commands `fulcrum workers` and `fulcrum occupancy`: the workers, and their GPU time by phase."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile


def workers(ready: ReadyFile = None, json: Json = False) -> None:
    """List the workers of the suite."""
    from libs.cli.tables import show_workers  # noqa: PLC0415 (what only this command needs)

    show_workers(ready, as_json=json)


def occupancy(
    window: Annotated[str, typer.Option(metavar="TIME", help="How far back: 500ms, 2s, 1m.")] = "2s",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show the share of GPU time in prefill, decode, KV wait and idle."""
    from libs.cli.tables import show_occupancy  # noqa: PLC0415 (what only this command needs)

    show_occupancy(ready, window, as_json=json)
