"""`fulcrum observe --page` as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

OBSERVE: Final = (sys.executable, "-m", "libs.cli.main", "observe", "--page")


@dataclass(frozen=True, slots=True)
class ObservePage:
    process: subprocess.Popen[str]
    answer: dict[str, Any]
    """The line that the command prints once it serves."""


@contextmanager
def observe_page(folder: Path, *arguments: str, port: int = 0, **env: str) -> Iterator[ObservePage]:
    """Run the page with keys and cache in a folder while the context is open, then wait for its process to end."""
    command = [*OBSERVE, "--port", str(port), "--json", *arguments]
    own = {"FULCRUM_KEYS": str(folder / "keys"), "XDG_CACHE_HOME": str(folder), **env}
    with subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield ObservePage(process, json.loads(process.stdout.readline()))
        finally:
            process.terminate()
