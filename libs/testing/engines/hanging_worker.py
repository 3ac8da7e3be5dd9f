"""A worker of vLLM's that never has its device: a start that hangs. It runs in the EngineCore process."""

import subprocess
import threading

from libs.engine.vllm.cpu_worker import MendedWorker


class HangingWorker(MendedWorker):
    """Starts a helper, as NCCL and compilers do, and waits."""

    def init_device(self) -> None:
        """Never returns."""
        subprocess.Popen(["sleep", "1000"])
        threading.Event().wait()
