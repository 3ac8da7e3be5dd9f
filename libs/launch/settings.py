"""The environment of `fulcrum up`, all of which is passed on to the services."""

import os
from typing import Any, Literal

from pydantic import Field

from libs.runtime.net.access import is_loopback
from libs.runtime.settings import CommonSettings

LOOPBACK_BATCH_TOPICS = "batch.*"


class LaunchSettings(CommonSettings):
    worker_threads: int = Field(0, ge=0, validation_alias="FULCRUM_WORKER_THREADS")
    """Threads of each worker's engine; 0 shares the machine's cores out."""
    worker_drain_s: float = Field(1.5, ge=0, validation_alias="FULCRUM_WORKER_DRAIN_S")
    """How long workers let sequences go on when the suite stops."""
    gateway_drain_s: int = Field(2, ge=0, validation_alias="FULCRUM_GATEWAY_DRAIN_S")
    """The same for gateways, which stop first."""

    worker_device: str = Field("auto", validation_alias="FULCRUM_WORKER_DEVICE")
    """What workers compute on; GPUs are dealt out among them unless it names one, or none."""
    vllm_arguments: dict[str, Any] = Field(default_factory=dict, validation_alias="FULCRUM_WORKER_VLLM_ARGUMENTS")
    """Arguments of vLLM's engine, which say how many GPUs a worker computes on."""

    worker_names: Literal["gpu", "role"] = Field("gpu", validation_alias="FULCRUM_WORKER_NAMES")
    """gpu-0, gpu-1, ..., which stay true when a worker gets another role; or by its first role, prefill-1, decode-1."""

    batch_topics: str | None = Field(None, validation_alias="FULCRUM_GATEWAY_BATCH_TOPICS")
    """Topics that batch jobs may read and write; where nobody says so, LOOPBACK_BATCH_TOPICS on loopback and none
    beyond."""

    keys: str = Field("", validation_alias="FULCRUM_KEYS")
    """Where hashes of API keys are: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster."""

    def batch_topics_allowed(self) -> str:
        """The value of the gateways' setting."""
        if self.batch_topics is not None:
            return self.batch_topics
        return LOOPBACK_BATCH_TOPICS if is_loopback(f"{self.host}:0") else ""

    def threads_of(self, workers: int) -> int:
        """Threads that each of `workers` gets."""
        return self.worker_threads or max(1, len(os.sched_getaffinity(0)) // workers)

    def cluster_of(self, gateway_port: int, *, own_stores: bool) -> str:
        """The name in topics and keys: suites that share a broker share it only where it is set."""
        return self.cluster if own_stores or "cluster" in self.model_fields_set else f"{self.cluster}-{gateway_port}"
