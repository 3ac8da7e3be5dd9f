"""The real model of tests, converted once and kept in the cache folder."""

import subprocess
import sys
from pathlib import Path

from libs.runtime.paths import cache_dir

REAL_MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERT_TIMEOUT_S = 300.0


def real_model_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted in a process of its own where it is not there yet."""
    folder = cache_dir() / "models" / REAL_MODEL_NAME
    command = [sys.executable, "-m", "libs.engine.torch.convert", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"conversion failed: {done.stderr.strip()}")
    return folder
