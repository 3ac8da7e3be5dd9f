"""vLLM's worker for CPUs with three corrections, in the process that computes.

The corrections concern the seeds of chunked prompts, a NIXL thread that occupies a whole core, and the binding of all
workers to the same core. They are written against the same vLLM as libs/engine/vllm/scheduler.py.
"""

import os
import sys
from typing import Any

import numpy as np
from vllm.distributed import nixl_utils
from vllm.v1.worker.cpu_worker import CPUWorker

# The longest time for which NIXL's thread waits for its sockets before it checks its other queues.
POLL_US = 100_000


class MendedWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker for CPUs with the three corrections."""

    def init_device(self) -> None:
        # The patch must precede the creation of KV connectors.
        _let_nixl_wait()
        super().init_device()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Create the KV cache and its connector, then restore the cores on which this thread may run.

        NIXL's connector binds the creating thread to the last core of the machine, so that copies run beside threads
        that compute. Here that thread computes, and so do those of all other workers on the machine.
        """
        cores = os.sched_getaffinity(0)
        super().initialize_from_config(*args, **kwargs)
        os.sched_setaffinity(0, cores)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample without the generators of sequences whose prompt is incomplete. vLLM discards these samples.

        vLLM would rewind these generators, which fails because a CPU's generator has no offset.
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
    # By default, NIXL's thread polls its sockets without a pause, which takes a core from computation.
    agent_class = nixl_utils.NixlWrapper
    if agent_class is None:
        return
    bindings = sys.modules[agent_class.__module__].nixlBind
    make = bindings.nixlAgent

    def make_waiting(name: str, config: Any) -> Any:
        config.pthrDelay = POLL_US
        return make(name, config)

    bindings.nixlAgent = make_waiting
