"""`fulcrum up` from checks to the last process gone, without the terminal."""

import os
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from libs.bus.embedded import broker_command, embedded_broker
from libs.launch import preflight
from libs.launch.folder import suite_folder
from libs.launch.gpus import visible_gpus
from libs.launch.helper import run_helper
from libs.launch.options import SuiteOptions
from libs.launch.plan import Place, Plan, make_plan
from libs.launch.process import ProcessLauncher
from libs.launch.ready import Ready, default_ready_file, write_ready
from libs.launch.report import Reporter
from libs.launch.serving import until_serving
from libs.launch.settings import LaunchSettings
from libs.launch.status import StatusLine
from libs.launch.suite import Suite
from libs.model.fetch import Model, resolve_model
from libs.runtime.paths import cache_dir
from libs.runtime.ports import LOOPBACK

TOKEN_BYTES = 24

OnReady = Callable[[Ready], Coroutine[Any, Any, None]]


class Up:
    """One run of `fulcrum up`."""

    def __init__(self, options: SuiteOptions, model: str | None, settings: LaunchSettings, reporter: Reporter) -> None:
        self._options = options
        self._model = model
        self._settings = settings
        self._reporter = reporter
        self._suite: Suite | None = None

    async def run(self, on_ready: OnReady) -> None:
        """Until cancelled; then, and when it raises StartupError, nothing of the suite is left."""
        with (
            preflight.gateway_port(self._options, self._settings.host) as port,
            preflight.broker_port(self._options) as broker_port,
        ):
            await self._run(replace(self._options, gateway_port=port), broker_port, on_ready)

    async def _run(self, options: SuiteOptions, broker_port: int, on_ready: OnReady) -> None:
        await preflight.check(options, self._settings.host)
        launcher = ProcessLauncher(logs_folder(options.gateway_port))
        helper = partial(run_helper, launcher, self._reporter)
        model = await resolve_model(self._model, engine=options.engine, helper=helper)
        files = [default_ready_file(options.gateway_port), *([options.json_ready] if options.json_ready else [])]
        async with suite_folder(*files) as folder:
            place = self._place(options, folder, broker_port)
            plan = make_plan(options, model, place)
            suite = self._suite = Suite(plan, launcher, self._reporter, restart=options.restart)
            try:
                ready = _ready(options, model, place, plan, await suite.start())
                await suite.unless_failed(until_serving(ready, [spec.name for spec in plan.workers]))
                for file in files:
                    write_ready(file, ready)
                await suite.unless_failed(on_ready(ready))
                raise await suite.failure
            finally:
                await suite.stop()

    def kill(self) -> None:
        """Do not wait for anything to drain."""
        if self._suite is not None:
            self._suite.kill()

    def _place(self, options: SuiteOptions, folder: Path, broker_port: int) -> Place:
        settings = self._settings
        planner_port, metrics_port = self._neighbours(options)
        own_stores = options.kafka is None and options.redis is None
        own_broker = options.kafka is None
        return Place(
            folder=folder,
            broker=broker_command(embedded_broker(), port=broker_port, folder=folder / "kafka") if own_broker else (),
            kafka=f"{LOOPBACK}:{broker_port}" if own_broker else "",
            redis_server="" if options.redis else preflight.find_redis_server(),
            planner_port=planner_port,
            metrics_port=metrics_port,
            worker_threads=settings.threads_of(options.workers),
            worker_drain_s=settings.worker_drain_s,
            gateway_drain_s=settings.gateway_drain_s,
            token=secrets.token_urlsafe(TOKEN_BYTES),
            cluster=settings.cluster_of(options.gateway_port, own_stores=own_stores),
            batch_topics=settings.batch_topics_allowed(),
            gpus=visible_gpus(os.environ) if options.engine != "sim" else (),
            worker_device=settings.worker_device,
            vllm_arguments=settings.vllm_arguments,
        )

    def _neighbours(self, options: SuiteOptions) -> tuple[int, int]:
        """The planner's port and that of metrics: the next two, for people to find. 0: the service picks one."""
        if self._options.gateway_port == 0:
            return 0, 0
        first = options.gateway_port + 1
        return preflight.free_port(self._settings.host, first), preflight.free_port(self._settings.host, first + 1)


def logs_folder(gateway_port: int) -> Path:
    """Where the processes of a suite log."""
    return cache_dir() / "logs" / str(gateway_port)


def _ready(options: SuiteOptions, model: Model, place: Place, plan: Plan, lines: dict[str, StatusLine]) -> Ready:
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
    )


def _reachable(url: str) -> str:
    """A service that listens on every address is asked on this machine's own."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
