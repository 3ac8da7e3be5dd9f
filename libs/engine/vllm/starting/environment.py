"""vLLM's environment in a worker and in the processes that vLLM starts. Pure, without vLLM."""

from collections.abc import Mapping

from libs.engine.config import EngineConfig
from libs.engine.vllm.plugin import LEASH_VARIABLE, MOONCAKE_PORT, NIXL_PORT, REVISION_VARIABLE, WAIT_VARIABLE


def defaults(config: EngineConfig, *, on_cpu: bool) -> Mapping[str, str]:
    """Return the variables to set unless the user has set them."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(max(config.kv_lease_ms // 1000, 1)),
    }
    if not on_cpu:
        # Without NVLink, as on a single GPU, UCX reads over TCP unless CUDA IPC is enabled explicitly.
        environment["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    else:
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads or 1),
            "UCX_TLS": "tcp,shm,self,cma",
            WAIT_VARIABLE: "1",
        }
    return environment


def own(*, host: str, nixl_port: int, mooncake_port: int, revision: str, worker_pid: int) -> Mapping[str, str]:
    """Return the variables that users cannot choose.

    Processes are spawned, since a forked one would not load the plug-in that its parent has already loaded.
    """
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_HOST_IP": host,
        NIXL_PORT: str(nixl_port),
        MOONCAKE_PORT: str(mooncake_port),
        LEASH_VARIABLE: str(worker_pid),
        REVISION_VARIABLE: revision,
    }
