"""A run of `fulcrum up`, from its checks to the end of the last process, without the terminal."""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from libs.bus.embedded import broker_command, embedded_broker
from libs.contracts.errors import StartupError
from libs.keys.store import keys_place
from libs.launch import preflight
from libs.launch.options import LaunchSettings, SuiteOptions
from libs.launch.plan import REDIS_SOCKET, PoolModel, SuiteLocation, SuitePlan, make_plan, visible_gpus
from libs.launch.processes.local import ProcessLauncher
from libs.launch.processes.port import ChildSpec, Launcher, Reporter, StatusLine
from libs.launch.ready import Ready, default_ready_file, logs_folder, write_ready
from libs.launch.suite import Suite
from libs.model.fetch import Helper, Model, resolve_model, size_bytes
from libs.runtime.http.serve import bind
from libs.runtime.net.ports import LOOPBACK

TOKEN_BYTES = 24

OnReady = Callable[[Ready], Coroutine[Any, Any, None]]


class Up:
    """One run of `fulcrum up`, from the first process to the last."""

    def __init__(self, options: SuiteOptions, model: str | None, settings: LaunchSettings, reporter: Reporter) -> None:
        self._options = options
        self._model = model
        self._settings = settings
        self._reporter = reporter
        self._suite: Suite | None = None

    async def run(self, on_ready: OnReady) -> None:
        """Run until cancelled. Every process of the suite has ended when this returns or raises StartupError."""
        with (
            preflight.gateway_port(self._options, self._settings.host) as port,
            preflight.broker_port(self._options) as broker_port,
        ):
            await self._run(replace(self._options, gateway_port=port), broker_port, on_ready)

    async def _run(self, options: SuiteOptions, broker_port: int, on_ready: OnReady) -> None:
        await preflight.check(options, self._settings.host)
        launcher = ProcessLauncher(logs_folder(options.gateway_port))
        helper = partial(run_helper, launcher, self._reporter)
        models = await self._pool_models(options, helper)
        model = (
            Model(models[0].name, models[0].path)
            if models
            else await resolve_model(self._model, engine=options.engine, helper=helper)
        )
        files = [default_ready_file(options.gateway_port), *([options.json_ready] if options.json_ready else [])]
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(suite_folder(*files))
            if not options.redis:
                check_socket_path(folder)
            spares_sock = bind(LOOPBACK, 0, "the launcher's port") if options.spare else None
            place = self._place(options, folder, broker_port, spares_sock)
            plan = make_plan(options, model, place, models)
            suite = self._suite = Suite(plan, launcher, self._reporter, restart=options.restart)
            try:
                if spares_sock is not None:
                    await stack.enter_async_context(_spares_route(suite, spares_sock, place.token))
                ready = _ready(options, model, place, plan, await suite.start())
                await suite.unless_failed(until_serving(ready, [spec.name for spec in plan.workers]))
                for file in files:
                    write_ready(file, ready)
                await suite.unless_failed(on_ready(ready))
                raise await suite.failure
            finally:
                await suite.stop()

    async def _pool_models(self, options: SuiteOptions, helper: Helper) -> list[PoolModel]:
        """Return the models that share the pool; empty without a pool. Raise StartupError."""
        if not options.pool:
            return []
        found = [
            await resolve_model(name, engine=options.engine, helper=helper) for name in options.models or (self._model,)
        ]
        names = [each.name for each in found]
        if len(set(names)) < len(names):
            raise StartupError(f"--model names {max(names, key=names.count)!r} twice")
        return [PoolModel(each.name, each.path, size_bytes(each)) for each in found]

    def kill(self) -> None:
        """Kill all processes at once, without a drain."""
        if self._suite is not None:
            self._suite.kill()

    def _place(
        self, options: SuiteOptions, folder: Path, broker_port: int, spares_sock: socket.socket | None
    ) -> SuiteLocation:
        settings = self._settings
        planner_port, metrics_port = self._neighbours(options)
        own_stores = options.kafka is None and options.redis is None
        own_broker = options.kafka is None
        cluster = settings.cluster_of(options.gateway_port, own_stores=own_stores)
        return SuiteLocation(
            folder=folder,
            broker=broker_command(embedded_broker(), port=broker_port, folder=folder / "kafka") if own_broker else (),
            kafka=f"{LOOPBACK}:{broker_port}" if own_broker else "",
            redis_server="" if options.redis else preflight.find_redis_server(),
            planner_port=planner_port,
            metrics_port=metrics_port,
            worker_threads=settings.threads_of(options.workers + options.spare),
            worker_drain_s=settings.worker_drain_s,
            gateway_drain_s=settings.gateway_drain_s,
            token=secrets.token_urlsafe(TOKEN_BYTES),
            cluster=cluster,
            keys=keys_place(settings.keys, cluster),
            spares_url="" if spares_sock is None else f"http://{LOOPBACK}:{spares_sock.getsockname()[1]}",
            batch_topics=settings.batch_topics_allowed(),
            gpus=visible_gpus(os.environ) if options.engine != "sim" else (),
            worker_device=settings.worker_device,
            vllm_arguments=settings.vllm_arguments | options.engine_arguments,
            names_by_role=settings.worker_names == "role",
        )

    def _neighbours(self, options: SuiteOptions) -> tuple[int, int]:
        """Return the ports of planner and metrics: the two after the gateway's, or 0 for any.

        Adjacent ports are easy to remember.
        """
        if self._options.gateway_port == 0:
            return 0, 0
        first = options.gateway_port + 1
        return preflight.free_port(self._settings.host, first), preflight.free_port(self._settings.host, first + 1)


def _spares_route(suite: Suite, sock: socket.socket, token: str) -> AbstractAsyncContextManager[str]:
    """Serve the planner's requests for spare workers."""
    from libs.launch.suite import make_spares_app  # noqa: PLC0415 (half a second, for suites with spares alone)
    from libs.runtime.http import serve_http  # noqa: PLC0415

    return serve_http(make_spares_app(suite.spares, token), sock, tasks=suite.tasks, drain_s=1)


def _ready(
    options: SuiteOptions, model: Model, place: SuiteLocation, plan: SuitePlan, lines: dict[str, StatusLine]
) -> Ready:
    gateways = tuple(_reachable(lines[spec.name].http) for spec in plan.gateways)
    return Ready(
        gateway=gateways[0],
        gateways=gateways,
        planner=_reachable(lines["planner"].http),
        metrics=_reachable(lines["metrics"].http),
        pid=os.getpid(),
        token=place.token,
        kafka=plan.kafka,
        redis=plan.redis,
        cluster=place.cluster,
        model=model.name,
        engine=options.engine,
        keys=place.keys,
    )


def _reachable(url: str) -> str:
    """Return the URL by which this machine reaches a service that listens on every address."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


# The longest path of a Unix socket on Linux. Redis silently truncates a longer one, and clients then cannot find it.
MAX_SOCKET_BYTES: Final = 107


def check_socket_path(folder: Path) -> None:
    """Raise StartupError if the path of the suite's Redis socket in this folder would be too long."""
    if len(os.fsencode(folder / REDIS_SOCKET)) > MAX_SOCKET_BYTES:
        raise StartupError(f"{folder} is too long a path for a Unix socket: set TMPDIR to a shorter folder")


# A shell that waits for the end of its input, which comes when the launcher dies, even by `kill -9`.
_SWEEP = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$@"'


@contextlib.asynccontextmanager
async def suite_folder(*files: Path) -> AsyncIterator[Path]:
    """Yield a new folder. Remove it and `files` at the end, even if the process dies. Raise StartupError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="fulcrum-"))
    except OSError as error:
        raise StartupError(f"no temporary folder can be made ({error.strerror}): set TMPDIR to another place") from None
    try:
        sweeper = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _SWEEP, "fulcrum-sweeper", str(folder), *map(str, files),
            stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield folder
        finally:
            if sweeper.stdin is not None:
                sweeper.stdin.close()
            await sweeper.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SERVING_TIMEOUT_S = 30.0
SERVING_POLL_S = 0.05
REQUEST_TIMEOUT_S = 2.0


async def until_serving(ready: Ready, workers: Sequence[str]) -> None:
    """Return once requests are answered and `workers` are registered. Raise StartupError after SERVING_TIMEOUT_S."""
    missing = "an answer"
    try:
        async with (
            asyncio.timeout(SERVING_TIMEOUT_S),
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, headers=_token(ready)) as client,
        ):
            while missing := await _missing(client, ready, workers):  # noqa: ASYNC110 (other processes set no event)
                await asyncio.sleep(SERVING_POLL_S)
    except TimeoutError:
        raise StartupError(
            f"the processes run, but after {SERVING_TIMEOUT_S:g} s there is still no {missing}"
        ) from None


def _token(ready: Ready) -> dict[str, str]:
    return {"authorization": f"Bearer {ready.token}"}


async def _missing(client: httpx.AsyncClient, ready: Ready, workers: Sequence[str]) -> str:
    """Describe the first part of the suite that is missing; empty once all parts serve."""
    try:
        for gateway in ready.gateways:
            if (await client.get(f"{gateway}/readyz")).status_code != httpx.codes.OK:
                return f"ready gateway at {gateway}"
        answer = await client.get(f"{ready.planner}/v1/workers")
        there = {str(worker["id"]) for worker in answer.json()} if answer.is_success else set()
    except httpx.TransportError as error:
        return f"answer from {error.request.url}"
    unseen = sorted(set(workers) - there)
    return f"registration of {', '.join(unseen)}" if unseen else ""


HELPER_GRACE_S = 2.0


async def run_helper(launcher: Launcher, reporter: Reporter, name: str, command: tuple[str, ...]) -> str:
    """Run a process that does one task, such as converting a model, and show its progress.

    Return the path that it reports; empty if it reports none. Raise StartupError with its message if it fails.
    """
    reporter.progress(name, "starting", 0.0)
    child = await launcher.start(ChildSpec(name, command, {}))
    path = error = ""
    try:
        async for line in child.statuses():
            if line.event == "progress":
                reporter.progress(name, line.stage, line.fraction)
            path, error = line.path or path, line.error or error
        code = await child.wait()
    finally:
        await child.stop(HELPER_GRACE_S)
    if code:
        reason = error or launcher.last_words(name) or f"exit code {code}"
        raise StartupError(f"{reason} (log: {launcher.log_of(name)})")
    reporter.ready(name, "")
    return path
