"""The embedded broker of `fulcrum up`: its program, which `make setup` builds, and its command line.

It is kfake (deploy/broker), a single process with consumer groups, transactions and fetches that wait. In contrast
to a cluster it has one copy of each record, which survives a killed broker but not a machine that loses power. It
keeps only the last 32 MiB of each telemetry partition. It listens on 127.0.0.1 only.
"""

import sys
from pathlib import Path

from libs.contracts.errors import StartupError

PROGRAM = "fulcrum-broker"


def embedded_broker() -> Path:
    """Return the program's path, next to this environment's Python. Raise StartupError if it has not been built."""
    program = Path(sys.prefix) / "bin" / PROGRAM
    if not program.is_file():
        raise StartupError("the embedded broker is not built: run `make setup`, or name a Kafka with --kafka")
    return program


def broker_command(program: Path, *, port: int, folder: Path) -> tuple[str, ...]:
    """Return the command of a broker on `port` of 127.0.0.1 that keeps its records in `folder` across restarts."""
    return (str(program), "-port", str(port), "-folder", str(folder))
