"""A launcher of local processes. Each has its own session, ends with its parent and logs stderr to a file."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import libs
from libs.contracts.errors import StartupError
from libs.launch.processes import leash
from libs.launch.processes.port import ChildSpec, StatusLine, parse_status
from libs.runtime.paths import create_private, private_folder

# A log that exceeds this size replaces the previous one, and a new log begins.
MAX_LOG_BYTES = 32 * 1024 * 1024
LAST_WORDS_BYTES = 4096
MAX_STATUS_BYTES = 64 * 1024
# With this setting, the thread that waits for completions reads the sockets. gRPC's newer method passes each message
# through three more threads, at 1.5 times the CPU time. gRPC reads the variable when it is imported. deploy/images sets
# the same value.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


class ProcessChild:
    def __init__(self, process: Process, stdout: asyncio.StreamReader, log: Path) -> None:
        self._process = process
        self._stdout = stdout
        self._log = log

    @property
    def pid(self) -> int:
        """The process id of the group's leader."""
        return self._process.pid

    async def statuses(self) -> AsyncIterator[StatusLine]:
        """Yield status lines. Write other lines to the log."""
        while True:
            try:
                line = await self._stdout.readline()
            except ValueError:  # longer than MAX_STATUS_BYTES, so no status line
                continue
            if not line:
                return
            status = parse_status(line)
            if status is not None:
                yield status
                continue
            with contextlib.suppress(OSError), self._log.open("ab") as log:
                log.write(line)
            yield StatusLine("text", stage=line.decode(errors="replace").rstrip())

    async def wait(self) -> int:
        """Return the exit code. A negative one is a signal's number."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the leader of the group, then SIGKILL to the group."""
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            self.kill()
        await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the group, which may outlive its leader."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ProcessLauncher:
    """A launcher of children as processes, with their logs in one folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: set[str] = set()

    async def start(self, spec: ChildSpec) -> ProcessChild:
        """Start a child. Raise StartupError if no process or file can be created."""
        try:
            return await self._start(spec)
        except OSError as error:
            raise StartupError(f"{spec.name} cannot be started: {error.strerror}") from None

    def log_of(self, name: str) -> str:
        return str(self._logs / f"{name}.log")

    def last_words(self, name: str) -> str:
        try:
            with Path(self.log_of(name)).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    async def bound_logs(self) -> None:
        """Truncate or replace logs that have grown too large."""
        await asyncio.to_thread(self._bound_logs)

    def _bound_logs(self) -> None:
        for name in sorted(self._started):
            log = Path(self.log_of(name))
            with contextlib.suppress(OSError):  # a full disk has space again once the log is truncated
                if log.stat().st_size > MAX_LOG_BYTES:
                    try:
                        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                    finally:
                        # The child has the log open for appending, so it can be truncated but not replaced.
                        os.truncate(log, 0)

    async def _start(self, spec: ChildSpec) -> ProcessChild:
        reader = asyncio.StreamReader(limit=MAX_STATUS_BYTES)
        # A separate pipe, because the end of a process must not wait for a grandchild that still has its output open.
        read_end, write_end = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        try:
            with self._open_log(spec.name) as log:
                process = await asyncio.create_subprocess_exec(
                    *_leashed(spec.command),
                    stdin=DEVNULL,
                    stdout=write_end,
                    stderr=log,
                    env=_environment(spec),
                    start_new_session=True,
                )
        except BaseException:
            transport.close()
            raise
        finally:
            os.close(write_end)
        return ProcessChild(process, reader, Path(self.log_of(spec.name)))

    def _open_log(self, name: str) -> BinaryIO:
        """Open a child's log, empty at the suite's start. A restarted child appends to it."""
        private_folder(self._logs, allowed=0o077)
        path = Path(self.log_of(name))
        if name not in self._started:
            create_private(path).close()
        self._started.add(name)
        return path.open("ab")


def _leashed(command: tuple[str, ...]) -> tuple[str, ...]:
    if command[0] == "python":
        command = (sys.executable, "-P", *command[1:])
    return (sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *command)


def _environment(spec: ChildSpec) -> dict[str, str]:
    """Return the child's environment, with this process's code in its path and the setting for gRPC."""
    root = str(Path(libs.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join((root, inherited)) if inherited else root
    return {"GRPC_EXPERIMENTS": GRPC_EXPERIMENTS, **os.environ, "PYTHONPATH": path, **spec.env}
