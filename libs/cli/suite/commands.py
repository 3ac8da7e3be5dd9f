"""The commands `fulcrum logs`, `audit` and `down`."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile, complete_log


def logs(
    worker: Annotated[
        str | None,
        typer.Argument(
            help="A worker, a gateway, planner or metrics. Default: list the processes that have logs.",
            show_default=False,
            autocompletion=complete_log,
        ),
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Continue with new lines until Ctrl-C.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, max=100_000, help="How many of the last lines to show.")
    ] = 50,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print lines as they are in the file.")] = False,
) -> None:
    """Show the last lines that a process of the suite logged."""
    from libs.cli.suite.logs import show_logs  # noqa: PLC0415 (what only this command needs)

    show_logs(ready, worker, follow=follow, limit=limit, as_json=json)


def audit(
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", metavar="N", min=1, max=100_000, help="How many of the newest events to list."),
    ] = 30,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Read this far back from the topic: 90m, 12h, 30d.", show_default=False),
    ] = None,
    actor: Annotated[str, typer.Option(metavar="ID", help="Only events of this key or of this machine's user.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only events of this tenant's keys.")] = "",
    *,
    refused: Annotated[
        bool, typer.Option("--refused", metavar="", help="List refused changes instead of changes.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Continue with new lines until Ctrl-C.")
    ] = False,
    ready: ReadyFile = None,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON value a line for each event.")
    ] = False,
) -> None:
    """List who changed keys, limits, roles, models, modes and silences, and who deleted what, the oldest first."""
    from libs.cli.suite.audit import AuditQuery, show_audit  # noqa: PLC0415 (what only this command needs)

    wanted = AuditQuery(limit=limit, since=since, actor=actor, tenant=tenant, refused=refused)
    show_audit(ready, wanted, follow=follow, as_json=json)


def down(
    ready: ReadyFile = None,
    now: Annotated[bool, typer.Option("--now", metavar="", help="Do not wait for requests to finish.")] = False,
    json: Json = False,
) -> None:
    """Stop the suite that `fulcrum up` started on this machine. Running requests may finish first."""
    from libs.cli.suite.down import stop_suite  # noqa: PLC0415 (what only this command needs)

    stop_suite(ready, now=now, as_json=json)
