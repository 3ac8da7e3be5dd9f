"""The suite's temporary folder, which goes away with it however it ends."""

import asyncio
import contextlib
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from pathlib import Path

from libs.contracts.errors import StartupError

_SWEEP = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$@"'
"""A shell that waits for the end of its input, which the launcher's death brings in any case, even `kill -9`."""


@contextlib.asynccontextmanager
async def suite_folder(*files: Path) -> AsyncIterator[Path]:
    """A new folder; it and `files` are removed when the context closes or the process dies. Raises StartupError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="fulcrum-"))
    except OSError as error:
        raise StartupError(f"no temporary folder can be made ({error.strerror}): set TMPDIR to another place") from None
    try:
        sweeper = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _SWEEP, "fulcrum-sweeper", str(folder), *map(str, files),
            stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield folder
        finally:
            if sweeper.stdin is not None:
                sweeper.stdin.close()
            await sweeper.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
