"""Asynchronous scheduling without a GPU: vLLM's own EngineCore decides a step while the one before runs in a thread.

vLLM schedules asynchronously on GPUs alone: on a CPU nothing would run beside the scheduler. Here the model runs on a
thread of its own, one step after the other, so that `step_with_batch_queue` and vLLM's AsyncScheduler work as on a GPU:
two steps are under way, outputs are placeholders until they come, blocks are freed after the step that still reads
them. The model, its KV and NIXL are real. What is left to a GPU is the runner's own part: tokens that stay on the
device from one step to the next, and drafts.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from libs.engine.config import EngineConfig
from libs.engine.vllm import launch
from libs.engine.vllm.connectors import Connector
from libs.engine.vllm.scheduler import AsyncStepScheduler

_configured = launch.configured


class ThreadedExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker on its own thread, which serves its calls in order."""

    vllm_config: VllmConfig

    def _init_executor(self) -> None:
        self._thread = ThreadPoolExecutor(1, "model")
        asynchronous: VllmConfig = self.vllm_config
        self.vllm_config = copy.copy(asynchronous)
        self.vllm_config.scheduler_config = copy.copy(asynchronous.scheduler_config)
        self.vllm_config.scheduler_config.async_scheduling = False  # a CPU's runner has its tokens before the next step
        try:
            self._thread.submit(super()._init_executor).result()
        finally:
            self.vllm_config = asynchronous

    def collective_rpc(  # noqa: PLR0917 - vLLM's own signature
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Return the worker's answer, or a future of it. `args` are copied, as for another process."""
        args = pickle.loads(pickle.dumps(args))  # noqa: S301 - our own, of this moment
        call = super().collective_rpc
        future: Future[Any] = self._thread.submit(
            call, method, timeout=timeout, args=args, kwargs=kwargs, single_value=single_value
        )
        return future if non_block else future.result()

    def shutdown(self) -> None:
        """End the worker once it has served all calls."""
        self._thread.submit(super().shutdown).result()
        self._thread.shutdown()


def configured_asynchronously(config: EngineConfig, connector: Connector) -> VllmConfig:
    """Configure vLLM to schedule asynchronously, as it does by default on a GPU. Replaces `launch.configured`."""
    vllm_config = _configured(config, connector)
    vllm_config.scheduler_config.async_scheduling = True
    vllm_config.scheduler_config.scheduler_cls = AsyncStepScheduler
    vllm_config.parallel_config.distributed_executor_backend = ThreadedExecutor
    return vllm_config
