"""The start of vLLM's processes on Linux: the files that they write for the worker, and the end of a hung start."""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from libs.contracts.errors import StartupError
from libs.engine.port import Capabilities
from libs.engine.vllm.connectors import ConnectorSession
from libs.engine.vllm.plugin import (
    BOARD_FILE,
    CAUSE_FILE,
    DUMMIES_FILE,
    FOLDER_VARIABLE,
    HANDSHAKE_FILE,
    KV_FILE,
    REGISTERED_FILE,
    STACK_FILE,
    STACK_SIGNAL,
)
from libs.engine.vllm.step_reports import Board, SpanRing
from libs.perfmodel.utilisation import KvShape

if TYPE_CHECKING:
    from libs.engine.vllm.wire import ImageReader


@dataclass(frozen=True, slots=True)
class StartedCore:
    """The properties of a running EngineCore, and the memory that it shares with the worker."""

    capabilities: Capabilities
    device: str
    handing: ConnectorSession
    """The connector that hands sequences over."""
    board: Board
    """The board that shows the running step."""
    dummies: SpanRing
    """The ring of ended dummy steps."""
    images: "ImageReader | None" = None
    """The reader of prompts' images; None if the engine serves none."""


@dataclass(frozen=True, slots=True)
class KvFacts:
    """The facts about EngineCore's KV, which EngineCore writes before it serves."""

    shape: KvShape
    order: str
    """The order of a block's dimensions in memory, by vLLM's name; empty if unknown."""
    has_states: bool
    """True if the model has state-space layers, whose KV is a state."""


# The name of the plug-in's entry point.
PLUGIN = "fulcrum"
# vLLM loads only the plug-ins named in this variable, or all of them if it is unset.
PLUGINS_VARIABLE = "VLLM_PLUGINS"


class Starting:
    """The folder for the files of vLLM's processes, which exists during the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def board(self) -> Path:
        """The file in which EngineCore publishes the running step."""
        return self._folder / BOARD_FILE

    @property
    def dummies(self) -> Path:
        """The file in which EngineCore publishes ended dummy steps."""
        return self._folder / DUMMIES_FILE

    def check(self, pids: Iterable[int]) -> None:
        """Raise StartupError if a process has not loaded the plug-in, without which it could outlive the worker."""
        if not all((self._folder / REGISTERED_FILE.format(pid=pid)).exists() for pid in pids):
            raise StartupError(
                f"vLLM has not loaded the plug-in {PLUGIN!r}, without which its processes outlive this worker: install"
                " this package, and not only its source, where vLLM is installed"
            )

    def kv(self) -> KvFacts:
        """Return the facts about the KV, which EngineCore wrote before it served."""
        return msgspec.json.decode((self._folder / KV_FILE).read_bytes(), type=KvFacts)

    def handshake(self) -> str:
        """Return a digest of the values that NIXL compares before it pulls blocks; empty without NIXL."""
        seen = {file.read_text() for file in self._folder.glob(HANDSHAKE_FILE.format(pid="*"))}
        return blake2b(" ".join(sorted(seen)).encode(), digest_size=4).hexdigest() if seen else ""

    def cause(self) -> str | None:
        """Return the error of the process that failed first; None if there is none."""
        with contextlib.suppress(OSError):
            return (self._folder / CAUSE_FILE).read_text()
        return None


@contextlib.contextmanager
def starting() -> Iterator[Starting]:
    """Provide the folder for processes started in this context.

    Raise the error that they wrote there as RuntimeError.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        here = Starting(Path(folder))
        try:
            yield here
        except Exception as error:
            cause = None if isinstance(error, StartupError) else here.cause()
            if cause is None:
                raise
            raise RuntimeError(cause) from error
        finally:
            del os.environ[FOLDER_VARIABLE]


def check_plugins(environ: Mapping[str, str]) -> None:
    """Raise StartupError if the user's choice of plug-ins excludes Fulcrum's."""
    chosen = environ.get(PLUGINS_VARIABLE)
    if chosen is not None and PLUGIN not in chosen.split(","):
        raise StartupError(f"{PLUGINS_VARIABLE} is {chosen!r}: name {PLUGIN!r} in it too, or leave it unset")


PROC: Final = Path("/proc")
# The upper bound of the time for processes to write their stacks.
STACK_S: Final = 1.0
LOOK_S: Final = 0.01
# The number of passes over the processes to kill. A process that is about to exec briefly shows no environment.
LOOKS: Final = 3
# The upper bound of the processes that the error names.
MAX_NAMED: Final = 3
# Python's own helper process, which ends by itself and may serve other processes.
TRACKER: Final = b"resource_tracker"
FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def started_processes(folder: str) -> list[int]:
    """Return the processes that were started with this folder, oldest first."""
    return sorted(pid for pid in _pids() if pid != os.getpid() and _is_of(pid, folder))


def end_start(*, explain: bool) -> list[str]:
    """Kill the processes of the start in progress. With `explain`, return where each of them hung."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:  # nothing has been started yet
        return []
    stood = _stacks(Path(folder), started_processes(folder)) if explain else []
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_S)
        for pid in started_processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return stood


def overdue_message(limit_s: float, stage: str, stood: list[str]) -> str:
    """Return the error message for a start that took too long, with the frames of `end_start`."""
    where = f": {'; '.join(stood[-MAX_NAMED:])}" if stood else ""
    return (
        f"vLLM has not started within {limit_s:g} s and its processes are ended, while {stage}{where}. Their log says"
        " what came before; FULCRUM_WORKER_VLLM_START_LIMIT_S gives them longer"
    )


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _is_of(pid: int, folder: str) -> bool:
    try:
        environ, command = (PROC / str(pid) / "environ").read_bytes(), (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:  # the process belongs to another user, or has ended
        return False
    return f"{FOLDER_VARIABLE}={folder}".encode() in environ.split(b"\0") and TRACKER not in command


def _stacks(folder: Path, pids: list[int]) -> list[str]:
    files = {pid: folder / STACK_FILE.format(pid=pid) for pid in pids}
    # The signal would kill a process that has no handler yet.
    signalled = {pid: file for pid, file in files.items() if file.exists()}
    for pid in signalled:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    until = time.monotonic() + STACK_S
    while not all(_innermost(file) for file in signalled.values()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return [f"process {pid} in {frame}" for pid, file in signalled.items() if (frame := _innermost(file))]


def _innermost(file: Path) -> str:
    """Return the innermost frame in a dump of faulthandler; empty if there is none yet."""
    with contextlib.suppress(OSError):
        if found := FRAME.search(file.read_text(errors="replace")):
            name = found["file"].rpartition("site-packages/")[2]
            return f"{found['function']} ({name}:{found['line']})"
    return ""
