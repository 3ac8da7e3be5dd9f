"""The command `fulcrum advice`: prints the commands that the verdict advises, or runs the first after confirmation."""

import asyncio
import json
import sys
from pathlib import Path

import typer

from libs.cli.find import find_one_suite, find_suite, get_json
from libs.cli.status.answer import STATUS_PATH, ActionAnswer, Status, parse_status
from libs.cli.status.show import commands
from libs.contracts.errors import StartupError

MIXED = "mixed"


def show_advice(ready_file: Path | None, *, apply: bool, yes: bool, as_json: bool) -> None:
    """Print the advice. Raises StartupError if there is no suite or the data are too old to act on."""
    suite = find_one_suite(ready_file) if apply else find_suite(ready_file)
    status = parse_status(get_json(suite.metrics, STATUS_PATH))
    verdict, advised = status.verdict, commands(status.verdict)
    if as_json:
        print(json.dumps({"verdict": verdict.code, "sentence": verdict.sentence, "commands": advised}))
    elif advised:
        print("\n".join(advised))
    else:
        print(f"Nothing to run: {verdict.sentence}", file=sys.stderr)
    if apply and verdict.action is not None:
        _apply(status, verdict.action, ready_file, yes=yes, as_json=as_json)


def _apply(status: Status, action: ActionAnswer, ready_file: Path | None, *, yes: bool, as_json: bool) -> None:
    if not status.live:
        raise StartupError(f"the data are old ({status.not_live_because}): look again before you act on them")
    if not yes and not typer.confirm(f"{status.verdict.sentence}\nRun `{action.command}`?", err=True):
        raise typer.Exit(1)
    from libs.cli.role.change import change_roles  # noqa: PLC0415 (gRPC, which the others do without)

    asyncio.run(
        change_roles(
            action.workers,
            role_text(action),
            epoch=None,
            reason=f"advice: {status.verdict.code}",
            force=False,
            first_step_s=0,
            ready_file=ready_file,
            as_json=as_json,
        )
    )


def role_text(action: ActionAnswer) -> str:
    """Return the role in the form that `fulcrum role` accepts."""
    return f"{MIXED}:{action.budget_tokens}" if action.role == MIXED and action.budget_tokens else action.role
