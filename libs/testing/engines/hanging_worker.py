"""A vLLM worker whose start hangs, since it never gets its device. It runs in the EngineCore process."""

import subprocess
import threading

from libs.engine.vllm.cpu_worker import MendedWorker


class HangingWorker(MendedWorker):
    """A worker that starts a helper, as NCCL and compilers do, and then waits."""

    def init_device(self) -> None:
        """Never returns."""
        subprocess.Popen(["sleep", "1000"])
        threading.Event().wait()
