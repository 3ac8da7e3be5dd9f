"""The release that this code belongs to."""

import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# "fulcrum" is another project's name on the package index.
DISTRIBUTION: Final = "fulcrum-serving"
TREE: Final = Path(__file__).resolve().parents[2]


def release() -> str:
    """Return the installed version. Raise PackageNotFoundError if only the files are there."""
    return version(DISTRIBUTION)


def commit() -> str:
    """Return the commit: the wheel's file COMMIT, else the checkout's, with "+" if it was changed; empty if unknown."""
    built = TREE / "COMMIT"
    if built.is_file():
        return built.read_text().strip()
    if not (TREE / ".git").exists():  # a repository around an installed package is not this one
        return ""
    try:
        found = subprocess.run(
            ("git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"),
            cwd=TREE, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def is_compiled() -> bool:
    """Return whether the modules on the path of a request are compiled (deploy/compile.py)."""
    found = find_spec("libs.engine.core")
    return found is not None and not (found.origin or "").endswith(".py")
