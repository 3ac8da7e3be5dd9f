"""Where Fulcrum keeps what outlives a run: converted models, logs, ready files."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """FULCRUM_CACHE, else the user's cache folder (XDG) with /fulcrum; not created here."""
    override = os.environ.get("FULCRUM_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fulcrum"
