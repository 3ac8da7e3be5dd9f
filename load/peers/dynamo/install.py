"""Install Dynamo into a venv of its own in the cache folder: python -m load.peers.dynamo.install."""

import subprocess
import sys
from pathlib import Path

from libs.runtime.paths import cache_dir

HERE = Path(__file__).parent
WHEELS, NEEDS = HERE / "wheels.txt", HERE / "needs.txt"


def python() -> Path:
    """Of the venv, whether it is there or not."""
    return cache_dir() / "peers" / "dynamo" / "bin" / "python"


def main() -> None:
    """Install unless the same has been installed before."""
    venv = python().parents[1]
    stamp, wanted = venv / "fulcrum-installed", WHEELS.read_text() + NEEDS.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], check=True)
    install = (*uv, "pip", "install", "--quiet", "--python", str(python()))
    subprocess.run([*install, "--no-deps", "-r", str(WHEELS)], check=True)
    subprocess.run([*install, "-r", str(NEEDS)], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
