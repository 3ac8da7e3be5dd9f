"""The broker that `fulcrum up` starts by itself: its program, which `make setup` builds, and its command line.

It is kfake (deploy/broker): one process with consumer groups, transactions and fetches that wait. What a cluster has
and it has not: one copy of each record, which outlives a killed broker but not a machine that loses power; the last
32 MiB of each partition of telemetry. It listens on 127.0.0.1 only.
"""

import sys
from pathlib import Path

from libs.contracts.errors import StartupError

PROGRAM = "fulcrum-broker"


def embedded_broker() -> Path:
    """The program's path, beside this environment's Python; raises StartupError where it has not been built."""
    program = Path(sys.prefix) / "bin" / PROGRAM
    if not program.is_file():
        raise StartupError("the embedded broker is not built: run `make setup`, or name a Kafka with --kafka")
    return program


def broker_command(program: Path, *, port: int, folder: Path) -> tuple[str, ...]:
    """A broker on `port` of 127.0.0.1 whose records are in `folder`, where one that is started again finds them."""
    return (str(program), "-port", str(port), "-folder", str(folder))
