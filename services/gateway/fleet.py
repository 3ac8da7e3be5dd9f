"""The gateway's links to registered workers. A link outlives its registry entry for as long as its stream lasts."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_ASLEEP, WORKER_STATE_LOADING, Worker
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Hello
from libs.contracts.protocol import Unpaired, unpaired
from libs.dispatch.ports import LinkListener
from libs.engine.kv_blocks import RandomBytes
from libs.policy.gateway.placement import WorkerKey
from libs.policy.gateway.view import MAX_SILENT_MS, QUIET_SHARE, SILENT_MS, WorkerSilence, WorkerView, whom_to_leave
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import Transport
from libs.stores.registry import Registry
from services.gateway.link import StreamTraffic, WorkerLink
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger()

# Pool workers in these states serve no model. They register with a new incarnation once they do.
_WITHOUT_MODEL = (WORKER_STATE_LOADING, WORKER_STATE_ASLEEP)


class WorkerLinks:
    """The links to registered workers, one for each incarnation.

    A worker that leaves the registry keeps its link until its stream breaks.
    """

    def __init__(
        self,
        *,
        hello: Hello,
        transport: Transport,
        traffic: StreamTraffic,
        tasks: TaskOwner,
        clock: Clock,
        random_bytes: RandomBytes,
        tpot_ns: float = 0.0,
        early_decodes: bool = False,
    ) -> None:
        """Create an empty set of links.

        `tpot_ns` is the TPOT target of requests that specify none; 0 means no target.
        """
        self._tpot_ns = tpot_ns
        self._early_decodes = early_decodes
        self._random_bytes = random_bytes
        self._hello = hello
        self._clock = clock
        self._transport = transport
        self._traffic = traffic
        self._tasks = tasks
        self._links: dict[WorkerKey, WorkerLink] = {}
        self._stop: dict[WorkerKey, Callable[[], object]] = {}
        self._registered: set[WorkerKey] = set()
        self.unpaired: dict[str, Unpaired] = {}
        """The registered workers, by id, that receive no requests because no other worker has compatible KV.
        """
        self.quiet: frozenset[str] = frozenset()
        """The ids of workers that have been silent for a short time. New work goes to others if possible."""

    @property
    def links(self) -> Iterable[WorkerLink]:
        """Return all links, including those still connecting."""
        return self._links.values()

    def link(self, key: WorkerKey) -> WorkerLink | None:
        """Return the link to one incarnation of a worker, or None once it is gone."""
        return self._links.get(key)

    def serving(self) -> dict[str, WorkerLink]:
        """Return the links to workers that accept work now, by id. Of two incarnations, the newer is returned."""
        found: dict[str, WorkerLink] = {}
        for link in self._links.values():
            held = found.get(link.id)
            if link.serving and (held is None or held.incarnation < link.incarnation):
                found[link.id] = link
        return found

    def views(self) -> list[WorkerView]:
        """Return the workers that accept work now, in the form that the binding policy reads."""
        return [view for link in self.serving().values() if (view := link.view()) is not None]

    def max_context_tokens(self, model: str, default: int) -> int:
        """Return the smallest context limit among the model's workers, at most `default`."""
        workers = (link.worker for link in self._links.values() if link.model == model)
        return min((worker.capabilities.max_context_tokens or default for worker in workers if worker), default=default)

    async def follow(self, registry: Registry, listener: LinkListener) -> None:
        """Connect to the workers that the registry lists, until cancelled.

        While the registry is unreachable, existing links stay open.
        """
        async for workers in registry.watch():
            self.update(workers, listener)

    def update(self, workers: Iterable[Worker], listener: LinkListener) -> None:
        """Open links to new workers and drop links to those that are gone.

        Changes of a known worker are ignored here, because it reports them over its own stream.
        """
        listed = {(worker.id, worker.incarnation): worker for worker in workers}
        self._registered = set(listed)
        for key, worker in listed.items():
            if key not in self._links and worker.state not in _WITHOUT_MODEL:
                self._open(key, worker, listener)
        self.drop_gone()
        self._log_unpaired(unpaired(listed.values()))

    def _log_unpaired(self, found: dict[str, Unpaired]) -> None:
        """Log each unpaired worker once, and again when the reason changes."""
        for worker_id, why in found.items():
            if self.unpaired.get(worker_id) != why:
                log.warning("worker has no partner", worker=worker_id, why=str(why))
        for worker_id in self.unpaired.keys() - found.keys():
            log.info("worker has a partner again, or is gone", worker=worker_id)
        self.unpaired = found

    def drop_gone(self) -> None:
        """Drop the links of unregistered workers whose stream is down."""
        for key, link in list(self._links.items()):
            if key not in self._registered and not link.connected:
                log.info("worker is gone", worker=link.id, incarnation=link.incarnation)
                del self._links[key]
                self._stop.pop(key)()

    def _open(self, key: WorkerKey, worker: Worker, listener: LinkListener) -> None:
        link = WorkerLink(
            worker,
            hello=self._hello,
            transport=self._transport,
            traffic=self._traffic,
            listener=listener,
            clock=self._clock,
            tpot_ns=self._tpot_ns,
            early_decodes=self._early_decodes,
            random_bytes=self._random_bytes,
        )
        self._links[key] = link
        self._stop[key] = self._tasks.spawn(f"link {worker.id}", link.run()).cancel


TICK_MS = 25.0
# The most silence that one tick adds. A longer tick means that this process was late, not the workers.
MAX_COUNTED_MS = 2 * TICK_MS


class SilenceWatch:
    """A periodic check of every link's silence. It ends streams that stay silent for too long."""

    def __init__(
        self,
        fleet: WorkerLinks,
        metrics: GatewayMetrics,
        silent_after_ms: float = SILENT_MS,
        max_silent_ms: float = MAX_SILENT_MS,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._silent_after_ms = silent_after_ms
        self._max_silent_ms = max(max_silent_ms, silent_after_ms)
        self._away: dict[tuple[str, int], str] = {}
        """The models of workers whose streams were ended, by worker id and incarnation."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ticked_s = loop.time()
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            now_s = loop.time()
            self.tick((now_s - ticked_s) * 1000)
            ticked_s = now_s

    def tick(self, passed_ms: float) -> None:
        """Add the time since the last tick to every link's silence."""
        counted_ms = min(passed_ms, MAX_COUNTED_MS)
        self._metrics.late_s.inc((passed_ms - counted_ms) / 1000)
        links = [link for link in self._fleet.links if link.connected]
        for link in links:
            link.silent_ms += counted_ms
        quiet_ms = QUIET_SHARE * self._silent_after_ms
        self._fleet.quiet = frozenset(link.id for link in links if link.overdue_ms >= quiet_ms)
        if any(link.overdue_ms >= self._silent_after_ms for link in links):
            self._leave()

    def _leave(self) -> None:
        links = list(self._fleet.links)
        still_away = {(link.id, link.incarnation) for link in links if link.left}
        self._away = {key: model for key, model in self._away.items() if key in still_away}
        workers = [
            WorkerSilence(place, link.model, link.overdue_ms, link.view())
            for place, link in enumerate(links)
            if link.connected and not link.left
        ]
        for each in whom_to_leave(workers, Counter(self._away.values()), self._silent_after_ms, self._max_silent_ms):
            link = links[each.place]
            running, silent_ms = len(link.running), round(each.silent_ms)
            log.warning("worker is silent", worker=link.id, silent_ms=silent_ms, sequences=running)
            self._metrics.silences.inc()
            self._away[link.id, link.incarnation] = each.model
            link.leave()
