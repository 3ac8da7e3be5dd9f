"""Folders for what Fulcrum keeps beyond a run, and their permissions."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_OTHERS = 0o077


def cache_dir() -> Path:
    """Return FULCRUM_CACHE, else the user's cache folder (XDG) with /fulcrum. The folder is not created."""
    override = os.environ.get("FULCRUM_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fulcrum"


def private_folder(folder: Path, *, allowed: int = 0) -> None:
    """Make a folder for this user alone, or check an existing one, whose mode is never changed.

    `allowed` holds the mode bits that others may have in an existing folder, since every file in it is private
    itself; they are logged. Raise PermissionError that names the required mode, and OSError if the folder cannot be
    made.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(folder))
    if mode & _OTHERS & ~allowed:
        raise PermissionError(
            errno.EACCES,
            f"the folder {folder} is there with mode {mode:04o}, which lets other users in, and it is not changed:"
            f" mode {PRIVATE_FOLDER:04o} is wanted (chmod 700, if nothing else needs it), or a path in a folder of its"
            " own, which is made",
        )
    if mode & _OTHERS:
        import structlog  # noqa: PLC0415 (60 ms, which every command of the command line would wait for)

        structlog.get_logger().warning("a folder remains accessible to other users", folder=str(folder), mode=oct(mode))


def create_private(path: Path) -> BinaryIO:
    """Create a file for this user alone, regardless of the umask, in place of an existing one."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.fchmod(number, PRIVATE_FILE)  # for a file that existed already
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "wb")
