"""Options that several commands share, the options of `fulcrum` itself, and shell completion from the running suite."""

from pathlib import Path
from typing import Annotated

import typer

ReadyFile = Annotated[
    Path | None,
    typer.Option("--ready", envvar="FULCRUM_READY", metavar="FILE", help="Ready file of the suite to talk to."),
]
MetricsUrl = Annotated[
    str | None,
    typer.Option("--metrics", metavar="URL", help="Metrics service to ask. Default: that of the running suite."),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON value on one line and nothing else.")]
JsonLines = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON value a line for each event.")]
ROLES = ("prefill", "decode", "mixed", "standby")


def complete_worker(incomplete: str) -> list[str]:
    """Return the ids of workers that begin with the typed text."""
    from libs.cli.find import find_suite, get_json  # noqa: PLC0415 (only when a shell asks)
    from libs.contracts.errors import FulcrumError  # noqa: PLC0415

    try:
        workers = get_json(find_suite(None, quiet=True).planner, "/v1/workers")
    except FulcrumError:
        return []
    return [worker["id"] for worker in workers if worker["id"].startswith(incomplete)]


def complete_role(incomplete: str) -> list[str]:
    """Return matching ids of workers, followed by the roles."""
    return [*complete_worker(incomplete), *(role for role in ROLES if role.startswith(incomplete))]


def complete_log(incomplete: str) -> list[str]:
    """Return the names of the suite's processes that log on this machine."""
    from libs.cli.find import find_suite  # noqa: PLC0415 (only when a shell asks)
    from libs.contracts.errors import FulcrumError  # noqa: PLC0415
    from libs.launch.ready import logs_folder  # noqa: PLC0415

    try:
        folder = logs_folder(find_suite(None, quiet=True).gateway_port)
    except FulcrumError:
        return []
    names = sorted(path.stem for path in folder.glob("*.log"))
    return [name for name in names if name.startswith(incomplete)]


def _version(wanted: bool) -> None:
    if wanted:
        from libs.runtime.release import commit, is_compiled, release  # noqa: PLC0415 (only when asked)

        facts = [fact for fact in (commit(), "compiled" if is_compiled() else "") if fact]
        print(f"fulcrum {release()} ({', '.join(facts)})" if facts else f"fulcrum {release()}")
        raise typer.Exit


def options(
    _version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """LLM serving split into prefill and decode, kept in balance."""
