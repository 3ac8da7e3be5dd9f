"""The supervision of one child: start, watch, and restart after a growing, bounded wait."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

from libs.contracts.errors import StartupError
from libs.launch.processes.port import Child, ChildSpec, Launcher, Reporter, StatusLine
from libs.runtime.backoff import Backoff
from libs.runtime.tasks import TaskOwner

FIRST_WAIT_S = 0.25
# Restarts continue forever at this pace, because the cause may be removed from outside.
MAX_WAIT_S = 10.0
# After serving for this time, a child restarts with the shortest wait again.
STABLE_S = 30.0
DEFAULT_GRACE_S = 5.0
LAST_OUTPUT_S = 1.0


class Supervisor:
    """The supervisor of one child, from `start` to `stop`."""

    def __init__(
        self,
        launcher: Launcher,
        spec: ChildSpec,
        reporter: Reporter,
        *,
        restart: bool,
        on_death: Callable[[StartupError], None],
    ) -> None:
        """Create the supervisor. It calls `on_death` once if a child that was ready dies and `restart` is off."""
        self.name = spec.name
        self.first_ready: asyncio.Future[StatusLine] = asyncio.get_running_loop().create_future()
        """The line by which the child first reports that it is ready, or a StartupError if it ends before."""
        self._launcher = launcher
        self._spec = spec
        self._reporter = reporter
        self._restart = restart
        self._on_death = on_death
        self._backoff = Backoff(first_s=FIRST_WAIT_S, max_s=MAX_WAIT_S)
        self._grace_s = DEFAULT_GRACE_S
        self._child: Child | None = None
        self._killed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: TaskOwner) -> None:
        self.first_ready.add_done_callback(_retrieve)
        self._task = tasks.spawn(f"supervise {self.name}", self._run())

    async def _run(self) -> None:
        while not self._killed.is_set():
            reason, served_s = await self._once()
            if self._killed.is_set():
                return
            if not self.first_ready.done():
                self.first_ready.set_exception(StartupError(f"{self.name} cannot start: {reason}"))
                return
            if not self._restart:
                self._on_death(StartupError(f"{self.name} died ({reason}), and --no-restart ends the suite with it"))
                return
            if served_s >= STABLE_S:
                self._backoff.reset()
            wait_s = self._backoff.next_s()
            self._reporter.note(f"{self.name} died ({reason}): starting it again in {wait_s:.2g} s")
            await asyncio.sleep(wait_s)

    async def stop(self, grace_s: float) -> None:
        """Stop the child, which has `grace_s` to drain."""
        self._grace_s = grace_s
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if not self.first_ready.done():
            self.first_ready.cancel()

    def kill(self) -> None:
        """Kill the child at once and do not restart it. A later `stop` returns at once."""
        self._killed.set()
        if self._child is not None:
            self._child.kill()

    async def _once(self) -> tuple[str, float]:
        """Run the child once. Return the reason for its end, and the time for which it was ready."""
        loop = asyncio.get_running_loop()
        self._reporter.progress(self.name, "starting", 0.0)
        try:
            child = await self._launcher.start(self._spec)
        except StartupError as error:
            return error.message, 0.0
        self._child = child
        life = _Life()
        watching = loop.create_task(self._watch(child, life), name=f"status of {self.name}")
        try:
            code = await child.wait()
        finally:
            try:
                await child.stop(self._grace_s)
                # Its output is closed now, so the rest of it can be read.
                await asyncio.wait([watching], timeout=LAST_OUTPUT_S)
            finally:
                self._child = None
                watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        served_s = loop.time() - life.ready_at_s if life.ready_at_s else 0.0
        return life.error or self._explain(code), served_s

    async def _watch(self, child: Child, life: "_Life") -> None:
        async for line in child.statuses():
            if line.event == "progress":
                self._reporter.progress(self.name, line.stage, line.fraction)
            elif line.event == "failed":
                life.error = line.error
            elif line.event == "ready" or (self._spec.ready_text and self._spec.ready_text in line.stage):
                life.ready_at_s = asyncio.get_running_loop().time()
                self._keep_port(line)
                self._reporter.ready(self.name, line.address)
                if not self.first_ready.done():
                    self.first_ready.set_result(line)

    def _keep_port(self, line: StatusLine) -> None:
        if self._spec.port_variable and line.http:
            port = urlsplit(line.http).port
            self._spec = replace(self._spec, env={**self._spec.env, self._spec.port_variable: str(port)})

    def _explain(self, code: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self._launcher.last_words(self.name) if code > 0 else ""
        return f"{how}{': ' if words else ''}{words}; log: {self._launcher.log_of(self.name)}"


class _Life:
    def __init__(self) -> None:
        self.ready_at_s = 0.0
        self.error = ""


def _retrieve(future: "asyncio.Future[StatusLine]") -> None:
    """Retrieve an exception that nothing awaits any more, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
