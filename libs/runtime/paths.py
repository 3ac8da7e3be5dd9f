"""Where Fulcrum keeps what outlives a run, and how it is closed to other users."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_OTHERS = 0o077


def cache_dir() -> Path:
    """FULCRUM_CACHE, else the user's cache folder (XDG) with /fulcrum; not created here."""
    override = os.environ.get("FULCRUM_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fulcrum"


def private_folder(folder: Path) -> None:
    """Make it for this user alone, or close one that is there to others; raises OSError where there can be none.

    One that is another user's, or shared by its sticky bit, stays as it is: what is put into it is closed all the same.
    """
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & _OTHERS:
        return
    import structlog  # noqa: PLC0415 (60 ms, which every command of the command line would wait for)

    log = structlog.get_logger()
    try:
        if mode & stat.S_ISVTX:
            raise PermissionError(None, "it is shared by its sticky bit")
        folder.chmod(mode & ~_OTHERS)
    except OSError as error:
        log.warning("a folder stays open to other users", folder=str(folder), mode=oct(mode), why=error.strerror)
    else:
        log.info("a folder is closed to other users", folder=str(folder), mode_before=oct(mode))


def create_private(path: Path) -> BinaryIO:
    """A new file to write, for this user alone whatever the umask; in place of what was there."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.fchmod(number, PRIVATE_FILE)  # of one that was there
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "wb")
