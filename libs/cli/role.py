"""`fulcrum role`: have a worker do something else, at once and without losing anything."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile


def role(
    worker: Annotated[str, typer.Argument(help="Id of the worker, as `fulcrum workers` lists it.", show_default=False)],
    role: Annotated[str, typer.Argument(help="prefill, decode, mixed, mixed:BUDGET or standby.", show_default=False)],
    *,
    epoch: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, metavar="N", help="Only if the worker is still at this epoch.")
    ] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Kept with the move.")] = "by hand",
    first_step_s: Annotated[
        float,
        typer.Option(min=0, max=600, metavar="S", help="How long to wait for the first step of the new role's kind."),
    ] = 2.0,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Give a worker another role. What runs there moves on with its KV, or ends there: nothing is aborted."""
    import asyncio  # noqa: PLC0415 (what only this command needs)

    from libs.cli.role_change import change_role  # noqa: PLC0415

    asyncio.run(
        change_role(worker, role, epoch=epoch, reason=reason, first_step_s=first_step_s, ready_file=ready, as_json=json)
    )
