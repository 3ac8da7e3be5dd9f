"""`fulcrum occupancy`: how the GPUs' time went, by phase."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile


def occupancy(
    window: Annotated[str, typer.Option(metavar="TIME", help="How far back: 500ms, 2s, 1m.")] = "2s",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show the share of GPU time in prefill, decode, KV wait and idle."""
    from libs.cli.tables import show_occupancy  # noqa: PLC0415 (what only this command needs)

    show_occupancy(ready, window, as_json=json)
