"""The lease of the one process that changes roles in a fleet, if all candidates run on one machine.

Servers behind a router offer no place for such a lease, so it is a locked file on this machine. Processes on other
machines, or of other users, do not see it.
"""

import fcntl
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from libs.observe.roles import FleetAway
from libs.runtime.paths import PRIVATE_FILE, PRIVATE_FOLDER

MAX_NAME_BYTES: Final = 200
DIGEST_CHARS: Final = 16


class FileLease:
    """A locked file, which the system unlocks however the process ends."""

    def __init__(self, folder: Path, fleet: str, identity: str) -> None:
        """Create the lease. `fleet` distinguishes fleets, for example by their router's address."""
        # Errors name the file without its folder, because readers of the status see them.
        self._path = folder / f"acts-{hashlib.sha256(fleet.encode()).hexdigest()[:DIGEST_CHARS]}"
        self._identity = identity
        self._file: int | None = None

    @property
    def _named(self) -> str:
        return f"{self._path.parent.name}/{self._path.name} of the cache folder, whose lock says who acts,"

    async def hold(self) -> str:
        if self._file is not None:
            return ""
        try:
            self._path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        except OSError as error:
            raise FleetAway(f"{self._named} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, MAX_NAME_BYTES, 0).decode(errors="replace")
            os.close(file)
            return holder or "another process"
        except OSError as error:  # a file system without locks
            os.close(file)
            raise FleetAway(f"{self._named} cannot be locked: {error.strerror}") from None
        self._file = file
        with suppress(OSError):  # on a full disk, the lock holds without a name
            os.ftruncate(file, 0)
            os.pwrite(file, self._identity.encode()[:MAX_NAME_BYTES], 0)
        return ""

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.ftruncate(file, 0)
            os.close(file)
