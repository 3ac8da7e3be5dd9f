"""The commands that act on a suite: `fulcrum chat`, `role`, `logs`, `audit` and `down`."""

from typing import Annotated

import typer

from libs.cli.options import Json, JsonLines, ReadyFile, complete_log, complete_role


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
    from libs.cli.suite.running import show_logs  # noqa: PLC0415 (what only this command needs)

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
    json: JsonLines = False,
) -> None:
    """List who changed keys, limits, roles, models, modes and silences, and who deleted what, the oldest first."""
    from libs.cli.suite.running import AuditQuery, show_audit  # noqa: PLC0415 (what only this command needs)

    wanted = AuditQuery(limit=limit, since=since, actor=actor, tenant=tenant, refused=refused)
    show_audit(ready, wanted, follow=follow, as_json=json)


def down(
    ready: ReadyFile = None,
    now: Annotated[bool, typer.Option("--now", metavar="", help="Do not wait for requests to finish.")] = False,
    json: Json = False,
) -> None:
    """Stop the suite that `fulcrum up` started on this machine. Running requests may finish first."""
    from libs.cli.suite.running import stop_suite  # noqa: PLC0415 (what only this command needs)

    stop_suite(ready, now=now, as_json=json)


def chat(
    prompt: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    *,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens to generate.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, metavar="T", help="0 is greedy. Default: the model's own.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Name from /v1/models. Default: the suite's first model.")
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Ask the suite a question and stream the answer."""
    import asyncio  # noqa: PLC0415 (what only this command needs)

    from libs.cli.suite.chat import answer_once  # noqa: PLC0415

    asyncio.run(answer_once(prompt, max_tokens, temperature, model, ready_file=ready, as_json=json))


def role(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORKER... ROLE...",
            help="Ids of workers (`fulcrum workers`), then prefill, decode, mixed, mixed:BUDGET or standby; other "
            "workers and their role may follow: a b prefill c d decode.",
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
        typer.Option(min=0, max=600, metavar="S", help="How long to wait for the first step in the new role."),
    ] = 2.0,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Change the roles of workers. Running requests move on with their KV or finish there; none is aborted."""
    from libs.cli.suite.role import change  # noqa: PLC0415 (what only this command needs)

    if len(words) < 2:
        raise typer.BadParameter("name a worker and its role, such as: fulcrum role gpu-1 prefill")
    change(ready, words=words, epoch=epoch, reason=reason, force=force, first_step_s=first_step_s, as_json=json)
