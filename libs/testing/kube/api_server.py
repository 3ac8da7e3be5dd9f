"""The API server's own process, killed and started again: for a control plane on this machine alone."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.testing.kube.namespace import CommandFailed, run

BACK_S: Final = 60.0
LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process that was killed."""

    command: list[str]
    log: Path

    def start_again(self) -> int:
        """Its new process id. It outlives this process."""
        with self.log.open("ab") as out:
            return subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ).pid


def _kill(pid: int) -> _Ended:
    process = Path(f"/proc/{pid}")
    command = (process / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
    found = _Ended(command, (process / "fd" / "1").readlink())
    os.kill(pid, signal.SIGKILL)
    return found


@asynccontextmanager
async def killed(pid_file: Path) -> AsyncIterator[None]:
    """Its process is killed as the context begins, and started as it was at its end; returns once it answers."""
    ended = _kill(int(await asyncio.to_thread(pid_file.read_text)))
    try:
        yield
    finally:
        await asyncio.to_thread(pid_file.write_text, f"{ended.start_again()}\n")
        async with asyncio.timeout(BACK_S):
            while not await _answers():  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_S)


async def _answers() -> bool:
    try:
        await run("kubectl", "get", "--raw", "/readyz")
    except CommandFailed:
        return False
    return True
