"""A plug-in that vLLM loads in each of its processes before anything else.

It makes the processes die with the worker, and restores the kernel's default time slice. On CPUs, processes that wait
for each other no longer occupy a core. NIXL identifies a model by its weights instead of its folder, and the compile
cache ignores port numbers.

vLLM's EngineCore outlives a parent that is killed, and keeps its memory. The plug-in asks Linux (PR_SET_PDEATHSIG) to
kill EngineCore with its parent, before any weight is loaded. If EngineCore cannot start, vLLM writes the reason only to
its log, so the plug-in also writes it to a file for the worker.

vLLM's processes poll each other with `sched_yield` for a second after the last message. If they compute on the same
cores, the polling occupies a core. Moreover, Linux before 6.19 suspends a process for seconds once it has yielded a
million times. It does so when another task wants the core, even if other cores are idle.
"""

import contextlib
import ctypes
import faulthandler
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libs.runtime.linux import USUAL_SLICE_NS, ask_slice

log = logging.getLogger("vllm.fulcrum")

PR_SET_PDEATHSIG = 1
# The pid of the worker, set for the processes that it starts. The plug-in does nothing in other uses of vLLM.
LEASH_VARIABLE = "FULCRUM_VLLM_LEASH"
# The folder of files for the worker while its processes start (libs/engine/vllm/starting.py).
FOLDER_VARIABLE = "FULCRUM_VLLM_FOLDER"
# Files with the error of the process that failed first, the mark of a registered process, and the hash by which NIXL
# recognises compatible blocks.
CAUSE_FILE, REGISTERED_FILE, HANDSHAKE_FILE = "cause", "registered.{pid}", "handshake.{pid}"
# The file to which a process writes its stack on the signal.
STACK_FILE, STACK_SIGNAL = "stack.{pid}", signal.SIGUSR2
# The revision of the weights, wherever they are stored.
REVISION_VARIABLE = "FULCRUM_VLLM_REVISION"
# The variables with ports on which a worker's processes listen, new at each start.
NIXL_PORT, MOONCAKE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"
# Set if the processes are to sleep until a message arrives.
WAIT_VARIABLE = "FULCRUM_VLLM_WAIT"
# The files in which EngineCore publishes the running step, ended dummy steps, and the facts about its KV.
BOARD_FILE, DUMMIES_FILE, KV_FILE = "board", "dummies", "kv"
# The file in which a computing process publishes to EngineCore when it encoded images.
ENCODES_FILE = "encodes"
# A factor that vLLM hashes for NIXL's handshake and nothing else.
HANDSHAKE_FACTOR = "nixl_connector_version"
# In the first second after a message, a process sleeps at most this long at a time, because the socket drops a
# notification that comes within a millisecond of another.
NEWS_SOON_S, NAP_MS = 1.0, 1


class _FirstCause(logging.Handler):
    """A log handler that writes the first logged exception to a new file."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        # The file must not exist, so that only the process that fails first writes its error.
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with contextlib.suppress(OSError), self._path.open("x") as file:
                file.write(str(error) or type(error).__name__)


def register() -> None:
    """Make the process die with its parent, record start errors, and patch vLLM. Do nothing in the worker itself."""
    worker_pid = os.environ.get(LEASH_VARIABLE)
    if not worker_pid or os.getpid() == int(worker_pid):
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == 1 and int(worker_pid) != 1:  # the parent died before the call above
            os._exit(1)
        ask_slice(USUAL_SLICE_NS)  # processes inherit the slice of the worker's loop
        if os.environ.get(WAIT_VARIABLE):
            _sleep_until_news()
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if revision := os.environ.get(REVISION_VARIABLE):
        forget_ports()
        name_model(revision, Path(folder, HANDSHAKE_FILE.format(pid=os.getpid())) if folder else None)
        if folder:
            time_encoding(Path(folder, ENCODES_FILE))
        check_pulls()
    if folder:
        logging.getLogger("vllm").addHandler(_FirstCause(Path(folder, CAUSE_FILE)))
        _write_stack_on_signal(Path(folder, STACK_FILE.format(pid=os.getpid())))
        with contextlib.suppress(OSError):  # the worker has stopped waiting and removed the folder
            Path(folder, REGISTERED_FILE.format(pid=os.getpid())).touch()


def _write_stack_on_signal(path: Path) -> None:
    # faulthandler also works while the process hangs in native code, which no Python signal handler interrupts.
    with contextlib.suppress(OSError):
        file = path.open("w")  # stays open, because faulthandler writes to its descriptor
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)


def forget_ports() -> None:
    """Remove the ports from the key of vLLM's compile cache, so that a start with new ports need not compile again."""
    from vllm import envs  # noqa: PLC0415

    compile_factors = envs.compile_factors

    def without_ports() -> dict[str, object]:
        return {name: value for name, value in compile_factors().items() if name not in (NIXL_PORT, MOONCAKE_PORT)}

    envs.compile_factors = without_ports


def name_model(revision: str, file: Path | None) -> None:
    """Make NIXL's handshake identify the model by its revision, and write the resulting hash to `file`.

    vLLM identifies a model by its folder, and would refuse hand-overs between equal weights in different folders.
    """
    from vllm.config import utils  # noqa: PLC0415

    hash_factors = utils.hash_factors

    def hash_named(factors: dict[str, object]) -> str:
        if HANDSHAKE_FACTOR not in factors:
            return str(hash_factors(factors))
        found = str(hash_factors(factors | {"model": revision}))
        if file is not None:
            with contextlib.suppress(OSError):
                file.write_text(found)
        return found

    utils.hash_factors = hash_named


def time_encoding(file: Path) -> None:
    """Make the first rank publish the times in which its model encodes images, from the creation of its KV on."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    initialize = WorkerWrapperBase.initialize_from_config

    def initialize_timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, *args, **kwargs)
        if self.global_rank == 0 and self.vllm_config.model_config.supports_multimodal_inputs:
            import torch  # noqa: PLC0415 - the plug-in is loaded first

            from libs.engine.vllm.step_reports import SpanRing  # noqa: PLC0415

            on_device = torch.accelerator.is_available()
            wait = torch.accelerator.synchronize if on_device else lambda: None
            time_encodes(self.worker.get_model(), SpanRing(file), wait)
        return result

    WorkerWrapperBase.initialize_from_config = initialize_timed


def check_pulls() -> None:
    """Make NIXL's connector, if it is configured, fail reads that left blocks unfilled."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    initialize = WorkerWrapperBase.initialize_from_config

    def initialize_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        _mark_pulls(self)
        return initialize(self, *args, **kwargs)

    WorkerWrapperBase.initialize_from_config = initialize_checked


def _mark_pulls(worker: Any) -> None:
    from libs.engine.vllm.connectors import NIXL, UNCHECKED  # noqa: PLC0415 - the plug-in is loaded first

    try:
        config = worker.vllm_config.kv_transfer_config
        if config is None or not config.has_connector(NIXL):
            return
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (  # noqa: PLC0415
            NixlPullConnectorWorker,
        )

        from libs.engine.vllm import pull_marks  # noqa: PLC0415 - the plug-in is loaded first

        pull_marks.install(NixlPullConnectorWorker)
    except (AttributeError, ImportError):  # the worker must serve in any case
        log.warning(UNCHECKED, exc_info=True)


def time_encodes(model: Any, encodes: Any, wait: Callable[[], object]) -> None:
    """Make a model's image encoder record its runs in `encodes`, a SpanRing. `wait` returns once the device is done."""
    encode = model.embed_multimodal

    def timed(**inputs: Any) -> Any:
        start_ns = time.time_ns()
        result = encode(**inputs)
        wait()
        encodes.ended(start_ns, time.time_ns())
        return result

    model.embed_multimodal = timed


def _sleep_until_news() -> None:
    # Readers then wait at once on the socket of their writer, rather than after a second of polling.
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    wait = SpinCondition.wait

    def nap(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + NEWS_SOON_S:
            timeout_ms = NAP_MS if timeout_ms is None else min(timeout_ms, NAP_MS)
        wait(self, timeout_ms)

    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0.0)
    SpinCondition.wait = nap


class MemoryReport:
    """A mix-in that vLLM adds to its worker class (`worker_extension_cls`)."""

    def fulcrum_device_memory(self) -> tuple[int, int] | None:
        """Return (total, free) bytes of this rank's device; None on a CPU."""
        import torch  # noqa: PLC0415 - the plug-in is loaded first, and needs none of it

        if not torch.accelerator.is_available():
            return None
        free, total = torch.accelerator.get_memory_info()
        return total, free
