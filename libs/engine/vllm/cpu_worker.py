"""vLLM's worker for CPUs, with two things mended: the seeds of chunked prompts, and a thread that takes a whole core.

It runs in the process that computes. Written against the same vLLM as libs/engine/vllm/scheduler.py.
"""

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
