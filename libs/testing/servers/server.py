"""A store's server as a child process that a test can kill, freeze and start again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from libs.launch.processes import leash

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4000


class ServerFailed(Exception):
    """The server did not start; the message holds the end of its log."""


class Server:
    """A server process with the same command at each start. It dies with the thread that started it."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, ready: Callable[[int], bool]) -> None:
        """`ready` is called with the process id until it returns true."""
        self.name = name
        self._command = (sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *command)
        self._log = log
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it serves. Raise ServerFailed."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._ready(self._process.pid):
            if self._ended_within(POLL_S) or time.monotonic() > deadline_s:
                self.kill()
                tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                raise ServerFailed(f"{self.name} did not start:\n{tail}")

    @property
    def pid(self) -> int:
        """The id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """True while its process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it with SIGKILL, like a crash."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def freeze(self) -> None:
        """Stop answering while connections stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Answer again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, by force after a while. Idempotent."""
        self.thaw()
        self._signal(signal.SIGTERM)
        if not self._ended_within(STOP_TIMEOUT_S):
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _ended_within(self, timeout_s: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
