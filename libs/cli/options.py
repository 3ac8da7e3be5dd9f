"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ReadyFile = Annotated[
    Path | None,
    typer.Option("--ready", envvar="FULCRUM_READY", metavar="FILE", help="Ready file of the suite to talk to."),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON value on one line and nothing else.")]
