"""The command `fulcrum observe`: prefill and decode shares of servers that Fulcrum does not run."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json


def observe(
    vllm: Annotated[
        list[str] | None,
        typer.Option("--vllm", metavar="URL", help="A vLLM server, e.g. http://10.0.0.5:8000. May be repeated."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded expositions (.scrapes.jsonl, also .gz) instead of servers."),
    ] = None,
    lines: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Stop after N lines of each server. Default: at Ctrl-C.")
    ] = None,
    json: Json = False,
) -> None:
    """Estimate how servers spend GPU time, from their /metrics alone: nothing is replaced, no request is touched."""
    from libs.cli.observe.show import replay_file, watch_servers  # noqa: PLC0415 (what only this command needs)

    if (replay is None) == (not vllm):
        raise typer.BadParameter("give servers by --vllm, or a recording by --replay")
    if replay is not None:
        replay_file(replay, as_json=json)
    else:
        watch_servers(vllm or [], lines, as_json=json)
