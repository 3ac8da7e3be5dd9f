"""Files that vLLM's processes leave for the worker while they start: that the plug-in is loaded, and errors."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from libs.contracts.errors import StartupError
from libs.engine.vllm.kv_facts import KvFacts
from libs.engine.vllm.plugin import (
    BOARD_FILE,
    CAUSE_FILE,
    DUMMIES_FILE,
    FOLDER_VARIABLE,
    HANDSHAKE_FILE,
    KV_FILE,
    REGISTERED_FILE,
)

# Name of the plug-in's entry point.
PLUGIN = "fulcrum"
# vLLM loads only the plug-ins named in this variable, or all if it is unset.
PLUGINS_VARIABLE = "VLLM_PLUGINS"


class Starting:
    """The folder for these files, which exists during the start."""

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
        """Raise StartupError unless each process has loaded the plug-in, without which it could outlive the worker."""
        if not all((self._folder / REGISTERED_FILE.format(pid=pid)).exists() for pid in pids):
            raise StartupError(
                f"vLLM has not loaded the plug-in {PLUGIN!r}, without which its processes outlive this worker: install"
                " this package, and not only its source, where vLLM is installed"
            )

    def kv(self) -> KvFacts:
        """Return the facts of its KV that EngineCore wrote before it served."""
        return msgspec.json.decode((self._folder / KV_FILE).read_bytes(), type=KvFacts)

    def handshake(self) -> str:
        """Return a digest of what NIXL compares before it pulls blocks; empty without NIXL."""
        seen = {file.read_text() for file in self._folder.glob(HANDSHAKE_FILE.format(pid="*"))}
        return blake2b(" ".join(sorted(seen)).encode(), digest_size=4).hexdigest() if seen else ""

    def cause(self) -> str | None:
        """Return the error of the process that failed first; None if there is none."""
        with contextlib.suppress(OSError):
            return (self._folder / CAUSE_FILE).read_text()
        return None


@contextlib.contextmanager
def starting() -> Iterator[Starting]:
    """Provide the folder for processes started in this context. Raise the error that they leave there as
    RuntimeError.
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
    """Raise StartupError if the user's choice of plug-ins leaves out ours."""
    chosen = environ.get(PLUGINS_VARIABLE)
    if chosen is not None and PLUGIN not in chosen.split(","):
        raise StartupError(f"{PLUGINS_VARIABLE} is {chosen!r}: name {PLUGIN!r} in it too, or leave it unset")
