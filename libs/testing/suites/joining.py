"""A worker that comes to a running suite by itself, as one on another machine would."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from libs.testing.suites.suite import RunningSuite

STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Its process, and the files of what it says."""

    process: "subprocess.Popen[bytes]"
    out: Path
    err: Path

    @property
    def ready(self) -> bool:
        """Whether it has said that it serves."""
        return '"ready"' in self.out.read_text()


@contextmanager
def joining(suite: RunningSuite, folder: Path, name: str, **settings: str) -> Iterator[Joined]:
    """A decode worker of that name; `settings` are environment variables beside those of every worker."""
    shared = {f"FULCRUM_{each.upper()}": suite.ready[each] for each in ("kafka", "redis", "token", "cluster")}
    own = {"FULCRUM_WORKER_ID": name, "FULCRUM_WORKER_ROLE": "decode"}
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    command = [sys.executable, "-m", "services.decode"]
    with out.open("w") as said, err.open("w") as logged:
        process = subprocess.Popen(command, env=suite.env | shared | own | settings, stdout=said, stderr=logged)
        try:
            yield Joined(process, out, err)
        finally:
            process.terminate()
            process.wait(STOP_S)
