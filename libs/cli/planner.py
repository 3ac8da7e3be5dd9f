"""`fulcrum planner`: what the planner may do."""

from typing import Annotated, Literal

import typer

from libs.cli.options import Json, ReadyFile

planner = typer.Typer(help="Look at the planner's mode, or set it.", no_args_is_help=True)


@planner.command(epilog="Example: fulcrum planner mode off")
def mode(
    mode: Annotated[
        Literal["off", "advisory", "auto"] | None,
        typer.Argument(
            help="off decides nothing; advisory publishes decisions and acts on none; auto has workers take the roles "
            "and budgets that were decided.",
            show_default=False,
        ),
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Set the planner's mode, which outlives its restart; without one, print it."""
    from libs.cli.planner_mode import planner_mode  # noqa: PLC0415 (what only this command needs)

    planner_mode(mode, ready_file=ready, as_json=json)
