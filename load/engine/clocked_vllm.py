"""vLLM's worker with an independent clock around its model calls.

It imports vLLM, so only the computing process may import it.
"""

import os
import struct
import time
from typing import Any

from libs.engine.vllm.cpu_worker import MendedWorker

FILE_VARIABLE = "FULCRUM_BENCH_CALLS"
# The start and the end by `time.time_ns`.
CALL = struct.Struct("<2q")


class ClockedWorker(MendedWorker):
    """A worker that records the start and end of each call, from the model's input to its sampled tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._start_ns = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self._start_ns = time.time_ns() if scheduler_output.total_num_scheduled_tokens else 0
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        result = super().sample_tokens(grammar_output)
        if self._start_ns:
            os.write(self._file, CALL.pack(self._start_ns, time.time_ns()))
        return result
