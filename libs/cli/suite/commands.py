"""`fulcrum logs` and `down`: of a suite that runs on this machine."""

from typing import Annotated

import typer

from libs.cli.completion import complete_log
from libs.cli.options import Json, ReadyFile


def logs(
    worker: Annotated[
        str | None,
        typer.Argument(
            help="A worker, a gateway, planner or metrics; without it: whose logs there are.",
            show_default=False,
            autocompletion=complete_log,
        ),
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar="", help="Go on, until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=100_000, help="Last lines.")] = 50,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", metavar="", help="Lines as they are in the file.")] = False,
) -> None:
    """Show the last lines that a process of the suite logged."""
    from libs.cli.suite.logs import show_logs  # noqa: PLC0415 (what only this command needs)

    show_logs(ready, worker, follow=follow, limit=limit, as_json=json)


def down(
    ready: ReadyFile = None,
    now: Annotated[bool, typer.Option("--now", metavar="", help="Do not wait for requests to finish.")] = False,
    json: Json = False,
) -> None:
    """Stop the suite that `fulcrum up` started on this machine; requests that run may finish first."""
    from libs.cli.suite.down import stop_suite  # noqa: PLC0415 (what only this command needs)

    stop_suite(ready, now=now, as_json=json)
