"""The task that scrapes observed servers and publishes the results as telemetry."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Bus
from libs.contracts import metric_names as names
from libs.contracts.errors import InvalidRequest, StartupError
from libs.contracts.foreign_text import plain
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, ModelQueue
from libs.contracts.topics import QUEUES, STEPS
from libs.observe.dynamo_folder import check_folder
from libs.observe.dynamo_steps import ENGINE as DYNAMO
from libs.observe.fleet import ObservedTarget, read_fleet, targets_of, token_of
from libs.observe.scrape import ScrapeFailed, Scraper
from libs.policy.verdict.state import PodLabel
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.metrics.observed.demand import ObservedDemand
from services.metrics.observed.dynamo import HEARTBEAT_MS, DynamoFleet
from services.metrics.observed.reports import StepReports
from services.metrics.observed.server import UNKNOWN_MODEL, ServerState, ServerTelemetry
from services.metrics.observed.traffic import ObservedTraffic
from services.metrics.settings import MetricsSettings
from services.metrics.status.observed import ObservedFleetStatus, ObservedServerStatus

log = structlog.get_logger()

FEW_SERVERS: Final = 100
"""Up to this many servers are scraped twice a second, more of them once."""
FEW_EVERY_MS, MANY_EVERY_MS = 500, 1_000
TIMEOUT_SHARE: Final = 0.8
"""The share of the interval that a scrape may take."""
# Servers that answer and those that did not at their last scrape have separate limits, so hanging servers delay no
# others.
MOST_SCRAPES: Final = 64
MOST_RETRIES: Final = 32
RETRY_S: Final = 2.0
"""The time between two scrapes of a server that does not answer."""
FIRST_RETRY_S: Final = 0.1
LIVE_LAG_MS, LAG_MS = 200, 400
"""Milliseconds, in addition to the interval, after which windows are written and read."""
FILE_EVERY_S: Final = 1.0
QUEUES_EVERY_S: Final = 0.5
GATEWAY: Final = "observed"
FIT_SHARE: Final = 0.1
"""The share of a core that fits of all servers may take."""
MOST_FITS_AT_ONCE_S: Final = 0.2
MAX_ARRIVED: Final = 2**48


def every_ms_of(servers: int, wanted_ms: int) -> int:
    """Return the interval between scrapes of one server; `wanted_ms` is 0 if unset."""
    return wanted_ms or (FEW_EVERY_MS if servers <= FEW_SERVERS else MANY_EVERY_MS)


class PodServers(Protocol):
    """Servers whose list follows a cluster's pods."""

    @property
    def targets(self) -> Sequence[ObservedTarget]: ...

    @property
    def trouble(self) -> str: ...

    @property
    def label(self) -> PodLabel:
        """The label with the role of pods."""
        ...

    async def follow(self, changed: Callable[[], None]) -> None: ...


def observe(settings: MetricsSettings, bus: Bus, clock: Clock, pods: PodServers | None = None) -> "ObservedFleet":
    """Build the fleet from the settings, and set the lags of windows to the needs of scrapes. Raise StartupError."""
    file = settings.observed_file()
    try:
        targets = targets_of(settings.observed_addresses()) if file is None else read_fleet(file)
        targets += [] if pods is None else pods.targets
        if (folder := settings.dynamo_folder()) is not None:
            check_folder(folder)
    except InvalidRequest as error:
        raise StartupError(error.message) from None
    every_ms = every_ms_of(len(targets), settings.observe_every_ms)
    # A scrape covers the time since the previous one, so windows are complete only after an interval and a scrape.
    wait_ms = every_ms if folder is None else max(every_ms, HEARTBEAT_MS)
    settings.live_lag_ms, settings.lag_ms = wait_ms + LIVE_LAG_MS, wait_ms + LAG_MS
    traffic = ObservedTraffic(
        ttft_limit_ns=settings.ttft_deadline_ms * 1_000_000, tpot_ns=round(settings.tpot_target_ms * 1e6)
    )
    return ObservedFleet(targets, bus, clock, traffic, every_ms=every_ms, pods=pods)


class FitBudget:
    """The CPU time that fits of all servers may take together; first fits have priority."""

    def __init__(self, thread_s: Callable[[], float] = time.thread_time, now_s: Callable[[], float] = time.monotonic):
        self._thread_s = thread_s
        self._now_s = now_s
        self._left_s = MOST_FITS_AT_ONCE_S
        self._filled_s = now_s()
        self._fitting = False
        self._fit_began_s = 0.0

    def may_fit(self, first: bool) -> bool:
        now_s = self._now_s()
        self._left_s = min(self._left_s + FIT_SHARE * (now_s - self._filled_s), MOST_FITS_AT_ONCE_S)
        self._filled_s = now_s
        allowed = self._left_s > (0.0 if first else MOST_FITS_AT_ONCE_S / 2)
        if allowed and not self._fitting:
            self._fitting, self._fit_began_s = True, self._thread_s()
        return allowed

    @contextmanager
    def charging(self) -> Iterator[None]:
        """Charge the time from the first fit in the context to its end to the budget."""
        # The clock of a thread costs a system call, too much for scrapes without a fit.
        self._fitting = False
        try:
            yield
        finally:
            if self._fitting:
                self._left_s -= self._thread_s() - self._fit_began_s


class ObservedFleet(Collector):
    """The observed servers, each scraped by a task of its own."""

    def __init__(
        self,
        targets: Sequence[ObservedTarget],
        bus: Bus,
        clock: Clock,
        traffic: ObservedTraffic,
        *,
        every_ms: int,
        pods: PodServers | None = None,
        budget: "FitBudget | None" = None,
    ) -> None:
        self.traffic = traffic
        self.demand = ObservedDemand(clock)
        self._bus = bus
        self._clock = clock
        self._every_s = every_ms / 1000
        self._budget = budget or FitBudget()
        self.reports = StepReports(self._budget.may_fit)
        self._servers: dict[str, ServerTelemetry] = {}
        self._scraping: dict[str, asyncio.Task[None]] = {}
        self._targets = list(targets)
        self._pods = pods
        self._tasks: TaskOwner | None = None
        self._dynamo: DynamoFleet | None = None
        for target in targets:
            self._servers[target.name] = ServerTelemetry(target, self._budget.may_fit)
        self._scrapes, self._retries = asyncio.Semaphore(MOST_SCRAPES), asyncio.Semaphore(MOST_RETRIES)
        self._began_ns = clock.now_ns()
        self._computed: Counter[str] = Counter()
        self._arrived: dict[str, int] = {}
        self._failures: Counter[str] = Counter()
        self._done = 0
        self.trouble = ""
        """The reason why the list of servers may be out of date; empty if it is current."""

    def server(self, name: str) -> ServerTelemetry:
        """Return the telemetry of a server in the list."""
        return self._servers[name]

    def start(self, tasks: TaskOwner, file: Path | None = None, dynamo: Path | None = None) -> None:
        """Observe the list, which `file` may change, and the workers of a Dynamo fleet's discovery folder."""
        self._tasks = tasks
        if dynamo is not None:
            self._dynamo = DynamoFleet(dynamo, self.report, self._clock, self.demand.enter)
            self._dynamo.start(tasks)
        self._follow(self._targets)
        tasks.spawn("observed queues", self._publish_queues())
        if file is not None:
            tasks.spawn("observed file", self._watch(file))
        if self._pods is not None:
            self._pods_changed()
            tasks.spawn("observed pods", self._pods.follow(self._pods_changed))

    def status(self) -> ObservedFleetStatus:
        """Return all servers in the order of their list, then Dynamo's workers."""
        found = (self._servers[each.name] for each in self._targets)
        servers = [
            ObservedServerStatus(
                each.target.name, each.target.url, each.target.role, each.model, each.state, plain(each.trouble),
                each.since_ns // 1_000_000, each.restarts,
            )
            for each in found
        ]  # fmt: skip
        workers = [] if self._dynamo is None else self._dynamo.status()
        return ObservedFleetStatus([*servers, *workers], plain(self.trouble))

    def models(self) -> dict[str, str]:
        """Return the models of all servers by name; empty where none is known yet."""
        listed = {name: "" if each.model == UNKNOWN_MODEL else each.model for name, each in self._servers.items()}
        return listed if self._dynamo is None else {**listed, **self._dynamo.models()}

    def names(self) -> dict[str, str]:
        """Return the names of the listed servers by address."""
        return {each.url: each.name for each in self._targets}

    def take_roles(self, roles: Mapping[str, str]) -> None:
        """Set the roles of the listed servers as reported by their router."""
        targets = [replace(each, role=roles.get(each.name, each.role)) for each in self._targets]
        if targets == self._targets:
            return
        if self._tasks is not None:
            self._follow(targets)
            return
        self._targets = targets
        for each in targets:
            self._servers[each.name].target = each

    def roles_differ(self, models: Sequence[str]) -> frozenset[str]:
        """Return the models whose servers do not all serve both phases, so that roles can be changed."""
        return frozenset(
            each.model for each in self._servers.values() if each.target.role != "mixed" and each.model in models
        )

    @property
    def look_every_ns(self) -> int:
        """The time within which many servers report nothing new; 0 for few servers."""
        return MANY_EVERY_MS * 1_000_000 if len(self._servers) > FEW_SERVERS else 0

    @property
    def pod_label(self) -> PodLabel | None:
        return None if self._pods is None else self._pods.label

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(names.OBSERVED_SCRAPES_TOTAL, "Successful scrapes.", self._done)
        failures = CounterMetricFamily(names.OBSERVED_SCRAPE_FAILURES_TOTAL, "Failed scrapes.", labels=["reason"])
        for reason, count in sorted(self._failures.items()):
            failures.add_metric([reason], count)
        yield failures
        counts = self.reports.counts
        yield CounterMetricFamily(names.OBSERVED_REPORTS_TOTAL, "Accepted reports of steps.", counts.taken)
        refused = CounterMetricFamily(
            names.OBSERVED_REPORTS_REFUSED_TOTAL, "Refused reports of steps by error code.", labels=["code"]
        )
        for code, count in sorted(counts.refused.items()):
            refused.add_metric([code], count)
        yield refused
        yield GaugeMetricFamily(
            names.OBSERVED_REPORTS_DROPPED,
            "Reports that engines dropped unsent, as they report it.",
            self.reports.dropped_batches,
        )
        if self._dynamo is not None:
            yield from self._dynamo.collect()
        states = Counter(each.state for each in self._servers.values())
        servers = GaugeMetricFamily(names.OBSERVED_SERVERS, "Observed servers by state.", labels=["state"])
        for state in ServerState:
            servers.add_metric([state], states[state])
        yield servers

    # ------------------------------------------------------------ the list

    def _follow(self, targets: Sequence[ObservedTarget]) -> None:
        """Scrape these servers from now on. A server that stays keeps its identity, its history and its fits."""
        assert self._tasks is not None
        wanted = {each.name: each for each in targets}
        for name in self._servers.keys() - wanted.keys():
            self._scraping.pop(name).cancel()
            if (farewell := self._servers.pop(name).farewell(self._clock.now_ns())) is not None:
                self._bus.publish(STEPS, farewell)
        for place, (name, target) in enumerate(wanted.items()):
            known = self._servers.get(name)
            if known is not None and known.target == target and name in self._scraping:
                continue
            moved = known is not None and known.target.url != target.url
            if known is None or moved:
                known = self._servers[name] = ServerTelemetry(target, self._budget.may_fit)
            known.target = target
            if (running := self._scraping.pop(name, None)) is not None:
                running.cancel()
            first_s = self._every_s * place / len(wanted)  # spread over the interval
            self._scraping[name] = self._tasks.spawn(f"observe {name}", self._scrape_forever(known, first_s))
        self._targets = list(targets)

    def _pods_changed(self) -> None:
        assert self._pods is not None
        self.trouble = self._pods.trouble
        if (targets := list(self._pods.targets)) != self._targets:
            self._follow(targets)

    async def _watch(self, file: Path) -> None:
        known = _stamp(file)
        while True:
            await asyncio.sleep(FILE_EVERY_S)
            stamp = _stamp(file)
            if stamp == known:
                continue
            known = stamp
            try:
                self._follow(read_fleet(file))
                self.trouble = ""
            except InvalidRequest as error:
                self.trouble = f"the file is invalid, so the last valid one applies: {error.message}"
                log.warning(
                    "the file of observed servers is invalid: the last valid one applies", error=plain(error.message)
                )

    # ------------------------------------------------------------ scraping

    async def _scrape_forever(self, server: ServerTelemetry, first_s: float) -> None:
        scraper = Scraper(server.target.url, TIMEOUT_SHARE * self._every_s)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + first_s
        try:
            while True:
                await asyncio.sleep(due_s - loop.time())
                before = server.state
                answers = before in (ServerState.OBSERVED, ServerState.LEARNING, ServerState.EXACT)
                async with self._scrapes if answers else self._retries:
                    await self._scrape(server, scraper)
                if server.state is ServerState.AWAY:
                    due_s = loop.time() + (FIRST_RETRY_S if answers else RETRY_S)
                else:
                    due_s = max(due_s + self._every_s, loop.time())
        finally:
            scraper.close()

    async def _scrape(self, server: ServerTelemetry, scraper: Scraper) -> None:
        try:
            exposition = await scraper.scrape(token_of(server.target))
        except ScrapeFailed as error:
            # A server that answers with an error is alive.
            state = ServerState.FOREIGN if error.reason in ("status", "garbage", "size") else ServerState.AWAY
            self.failed(server, state, error.reason, error.message)
        except InvalidRequest as error:
            self.failed(server, ServerState.FOREIGN, "token", error.message)
        else:
            self.take(server, exposition)

    def failed(self, server: ServerTelemetry, state: ServerState, reason: str, message: str) -> None:
        self._failures[reason] += 1
        server.failed(state, message, self._clock.now_ns())

    def take(self, server: ServerTelemetry, exposition: bytes) -> None:
        """Publish the telemetry of a new exposition."""
        now_ns = self._clock.now_ns()
        try:
            with self._budget.charging():
                exact = self.reports.is_exact(server.target.name, now_ns)
                scraped = server.take(exposition, now_ns, exact=exact)
        except InvalidRequest as error:
            self.failed(server, ServerState.FOREIGN, "foreign", error.message)
            return
        self._done += 1
        for batch in scraped.batches:
            self._bus.publish(STEPS, batch)
        if scraped.before is not None:
            self.traffic.enter(server.model, scraped.before, scraped.after, now_ns)
            self._computed[server.model] += scraped.prompt_tokens
        self.demand.enter(server.target.name, server.model, server.target.role, scraped.demand)

    def report(self, body: bytes) -> None:
        """Publish the steps that an engine reports itself. Raise a FulcrumError for a report that is refused."""
        with self._budget.charging():
            batch = self.reports.take(body, self._clock.now_ns())
        server = self._servers.get(batch.group or batch.worker_id)
        if server is None and batch.engine != DYNAMO:
            self.demand.report(batch)
        if server is not None and server.target.role != "mixed":  # the list describes the router's configuration
            batch.assignment.role = ROLE_PREFILL if server.target.role == "prefill" else ROLE_MIXED
            batch.assignment.budget_tokens = 0
        if server is not None and server.target.model:
            batch.assignment.model = server.target.model
        self._bus.publish(STEPS, batch)

    async def _publish_queues(self) -> None:
        while True:
            await asyncio.sleep(QUEUES_EVERY_S)
            self.publish_queues()

    def publish_queues(self) -> None:
        """Publish the servers' demand as a gateway would, since their clients use none."""
        waiting: Counter[str] = Counter()
        for each in self._servers.values():
            waiting[each.model] += each.waiting_tokens
        for model in waiting:
            # Prompts are counted at their first token, but waiting ones have arrived as well.
            arrived = min(self._computed[model] + waiting[model], MAX_ARRIVED)
            self._arrived[model] = max(self._arrived.get(model, 0), arrived)
        message = GatewayQueues(
            gateway_id=GATEWAY,
            incarnation=self._began_ns,
            told_unix_ns=self._clock.now_ns(),
            queues=[ModelQueue(model=model, arrived_tokens=count) for model, count in self._arrived.items() if model],
        )
        self._bus.publish(QUEUES, message)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
