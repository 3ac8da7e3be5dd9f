"""vLLM's worker for CPUs, with three things mended: the seeds of chunked prompts, a thread that takes a whole core, and
the one core that all workers of a machine would compute on.

It runs in the process that computes. Written against the same vLLM as libs/engine/vllm/scheduling/scheduler.py.
"""

import os
import sys
from typing import Any

import numpy as np
from vllm.distributed import nixl_utils
from vllm.v1.worker.cpu_worker import CPUWorker

POLL_US = 100_000
"""NIXL's thread waits this long at most for its sockets before it looks at its other queues."""


class MendedWorker(CPUWorker):  # type: ignore[misc]
    """Computes as vLLM's own does."""

    def init_device(self) -> None:
        """Before KV connectors come to be."""
        _let_nixl_wait()
        super().init_device()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Make the KV cache and its connector, on the cores that were allowed before.

        NIXL's connector binds the thread that makes it to the last core of the machine, to copy there beside those
        that compute; but that thread computes, and every worker here does the same.
        """
        cores = os.sched_getaffinity(0)
        super().initialize_from_config(*args, **kwargs)
        os.sched_setaffinity(0, cores)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Draw for the sequences whose prompt is whole, and for the others what is thrown away.

        vLLM draws for all of them and rewinds the generators of those others, and dies of it: a CPU's generator has
        no offset.
        """
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        batch, partly = self.model_runner.input_batch, self.model_runner.discard_request_mask.np
        rows = np.nonzero(partly[: batch.num_reqs])[0].tolist()
        aside = {row: batch.generators.pop(row) for row in rows if row in batch.generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(aside)


def _let_nixl_wait() -> None:
    """NIXL's thread asks its sockets for news without a pause, which takes a core from those that compute."""
    agent_class = nixl_utils.NixlWrapper
    if agent_class is None:
        return
    bindings = sys.modules[agent_class.__module__].nixlBind
    make = bindings.nixlAgent

    def make_waiting(name: str, config: Any) -> Any:
        config.pthrDelay = POLL_US
        return make(name, config)

    bindings.nixlAgent = make_waiting
