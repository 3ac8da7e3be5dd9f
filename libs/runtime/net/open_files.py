"""How many files, sockets included, this process may have open."""

import resource
from contextlib import suppress

WANTED_FILES = 65_536


def raise_open_files() -> None:
    """Up to what the system allows: shells commonly start with 1,024, fewer than a busy gateway has connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_open_files() -> int:
    """The limit as it stands."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
