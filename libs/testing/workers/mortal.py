"""Sim workers that die of marked prompts, in the processes of a suite under test.

Python runs `sitecustomize` at its start. `mortal_env` puts one into a folder and returns the environment in which it
arms every worker. No service knows of it.
"""

import os
import signal
from pathlib import Path

from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner

PROMPT_MARK = "worker, die of this prompt"
TOKENS_MARK = "worker, die of a token"
FATAL_TOKENS = 6
"""The number of output tokens after which a prompt with TOKENS_MARK is fatal."""
_CUSTOMIZE = """
import sys
if {"services.prefill", "services.decode"} & set(sys.orig_argv):
    from libs.testing.workers.mortal import arm
    arm()
"""


def mortal_env(folder: Path) -> dict[str, str]:
    """Return the environment for a suite whose workers are mortal."""
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE)
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([path] if path else [])])}


def arm() -> None:
    """Make this process end as by `kill -9` when its device computes a marked prompt."""
    run = SimRunner.run

    async def mortal(self: SimRunner, batch: Batch) -> dict[int, Sampled]:
        for chunk in batch.chunks:
            text = bytes(token % 256 for token in chunk.history.tolist()).decode(errors="replace")
            late = chunk.decodes and len(chunk.history) >= chunk.prompt_tokens + FATAL_TOKENS
            if PROMPT_MARK in text or (TOKENS_MARK in text and late):
                os.kill(os.getpid(), signal.SIGKILL)
        return await run(self, batch)

    SimRunner.run = mortal  # type: ignore[method-assign]
