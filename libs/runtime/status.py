"""Status lines by which a service reports its progress to its launcher: JSON Lines on stdout.

{"event": "progress", "stage": "loading weights", "fraction": 0.4}
{"event": "ready", "http": "http://127.0.0.1:8000"}
{"event": "failed", "error": "port 8000 is in use: ..."}
"""

import json
import sys
from typing import Any


def emit(event: str, **fields: Any) -> None:
    """Write one status line. A launcher that has gone is not an error."""
    try:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        pass


def progress(stage: str, fraction: float) -> None:
    """Report the finished fraction of a stage, 0..1."""
    emit("progress", stage=stage, fraction=round(fraction, 3))
