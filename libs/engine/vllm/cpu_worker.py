"""vLLM's worker for CPUs with three corrections, run in the computing process.

They concern the seeds of chunked prompts, a thread that occupies a whole core, and the binding of all workers to the
same core. Written against the same vLLM as libs/engine/vllm/scheduler.py.
"""

import os
import sys
from typing import Any

import numpy as np
from vllm.distributed import nixl_utils
from vllm.v1.worker.cpu_worker import CPUWorker

# The longest time that NIXL's thread waits for its sockets before it checks its other queues.
POLL_US = 100_000


class MendedWorker(CPUWorker):  # type: ignore[misc]
    """A worker that computes like vLLM's own, with the corrections above."""

    def init_device(self) -> None:
        # This runs before KV connectors are created.
        _let_nixl_wait()
        super().init_device()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Create the KV cache and its connector, then restore the cores that this thread may use.

        NIXL's connector binds the thread that creates it to the last core of the machine, for copying beside
        threads that compute. But this thread computes, and every worker on the machine does the same.
        """
        cores = os.sched_getaffinity(0)
        super().initialize_from_config(*args, **kwargs)
        os.sched_setaffinity(0, cores)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample without the generators of sequences whose prompt is incomplete; their samples are dropped anyway.

        vLLM samples for all of them and rewinds these generators. That fails, because a CPU's generator has no offset.
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
