"""The command `fulcrum role`, which gives workers another role without losing anything.

It calls each worker itself; the planner's `PUT /v1/workers/ID/role` is for the page.
"""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile, complete_role


def role(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKER... ROLE",
            help="Ids of workers (`fulcrum workers`), then prefill, decode, mixed, mixed:BUDGET or standby.",
            show_default=False,
            autocompletion=complete_role,
        ),
    ],
    *,
    epoch: Annotated[
        int | None,
        typer.Option(min=1, max=2**63 - 1, metavar="N", help="Change only workers that are still at this epoch."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Move workers even if no other computes prompts or decodes.")
    ] = False,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason recorded with the move.")] = "by hand",
    first_step_s: Annotated[
        float,
        typer.Option(min=0, max=600, metavar="S", help="How long to wait for the first step of the new role's kind."),
    ] = 2.0,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Give workers another role. Running requests move on with their KV or finish there: none is aborted."""
    from libs.cli.role.change import change  # noqa: PLC0415 (what only this command needs)

    if len(words) < 2:
        raise typer.BadParameter("name a worker and its role, such as: fulcrum role gpu-1 prefill")
    change(ready, words=words, epoch=epoch, reason=reason, force=force, first_step_s=first_step_s, as_json=json)
