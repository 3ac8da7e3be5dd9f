"""`fulcrum status`, `advice`, `alerts` and `events`: is the cluster balanced, what is to be done, what has happened."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", metavar="", help="Again every second, until Ctrl-C.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Is the cluster balanced, and what should be done? The verdict first, then the figures behind it."""
    from libs.cli.status.watch import show_status  # noqa: PLC0415 (what only this command needs)

    show_status(ready, watch=watch, as_json=json)


def advice(
    apply: Annotated[bool, typer.Option("--apply", metavar="", help="Ask, then do what is advised first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="With --apply: do not ask.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Print the commands that would bring the cluster into balance, a line each; nothing where there are none."""
    from libs.cli.status.advice import show_advice  # noqa: PLC0415 (what only this command needs)

    show_advice(ready, apply=apply, yes=yes, as_json=json)


def alerts(
    over: Annotated[bool, typer.Option("--all", "-a", metavar="", help="Those too that are over.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show the alerts that fire, since when, why, and where it says what to do."""
    from libs.cli.status.alerts import show_alerts  # noqa: PLC0415 (what only this command needs)

    show_alerts(ready, over=over, as_json=json)


def events(
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, max=1000, help="How many, the newest.")
    ] = 30,
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar="", help="Go on, until Ctrl-C.")] = False,
    ready: ReadyFile = None,
    json: Annotated[bool, typer.Option("--json", metavar="", help="A line for each, one JSON value on it.")] = False,
) -> None:
    """List role moves, decisions, workers that came or died, and alerts, the oldest first."""
    from libs.cli.status.events import show_events  # noqa: PLC0415 (what only this command needs)

    show_events(ready, limit=limit, follow=follow, as_json=json)
