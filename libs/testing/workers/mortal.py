"""Workers of the sim engine that die of marked prompts, in processes of a suite under test.

Python runs `sitecustomize` at its start: `mortal_env` gives an environment in which that of a test's folder arms every
worker. No service knows of it.
"""

import os
import signal
from pathlib import Path

from libs.engine.runner import Batch, Sampled
from libs.engine.sim import SimRunner

PROMPT_MARK = "worker, die of this prompt"
TOKENS_MARK = "worker, die of a token"
FATAL_TOKENS = 6
"""Output tokens after which the second kind is fatal."""
_CUSTOMIZE = """
import sys
if {"services.prefill", "services.decode"} & set(sys.orig_argv):
    from libs.testing.workers.mortal import arm
    arm()
"""


def mortal_env(folder: Path) -> dict[str, str]:
    """For a suite."""
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE)
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([path] if path else [])])}


def arm() -> None:
    """This process ends as by `kill -9` when its device computes what is marked."""
    run = SimRunner.run

    async def mortal(self: SimRunner, batch: Batch) -> dict[int, Sampled]:
        for chunk in batch.chunks:
            text = bytes(token % 256 for token in chunk.history.tolist()).decode(errors="replace")
            late = chunk.decodes and len(chunk.history) >= chunk.prompt_tokens + FATAL_TOKENS
            if PROMPT_MARK in text or (TOKENS_MARK in text and late):
                os.kill(os.getpid(), signal.SIGKILL)
        return await run(self, batch)

    SimRunner.run = mortal  # type: ignore[method-assign]
