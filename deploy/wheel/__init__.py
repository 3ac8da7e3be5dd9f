"""Fulcrum as an installed package. Its `libs` and `services` are in `tree`, where they clash with no other package."""

import os
import sys
from pathlib import Path

TREE = Path(__file__).parent / "tree"


def enter() -> None:
    """Make `libs` and `services` importable in this process and in the processes that it starts."""
    if str(TREE) in sys.path:
        return
    sys.path.insert(0, str(TREE))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TREE), inherited)) if inherited else str(TREE)


def main() -> None:
    enter()
    from libs.cli.main import main as run  # noqa: PLC0415 (importable from here on)

    run()


def register() -> None:
    """Register with vLLM, which calls this in each of its processes."""
    enter()
    from libs.engine.vllm.plugin import register as own  # noqa: PLC0415

    own()
