"""The batch service of a gateway: its view of all jobs, its lanes of jobs and shares, and its routes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter

from libs.bus.work import WorkBus
from libs.contracts.topics import BATCH_JOBS, BATCH_SHARES, BATCH_SUBMIT
from libs.dispatch.dispatcher import Dispatcher
from libs.filestore.port import FileStore, StoreTotals
from libs.keys.table import KeyTable
from libs.policy.batch import GatewayLoad
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.gateway.batch.begin import AllowedTopics, Submissions
from services.gateway.batch.bounds import Retention, TenantBounds
from services.gateway.batch.keeper import JobKeeper
from services.gateway.batch.line_request import LineRequester, ServedModels, Slots
from services.gateway.batch.routes import make_batch_router
from services.gateway.batch.runner import LaneRunner
from services.gateway.batch.view import KEEPERS, JobView
from services.gateway.fleet import WorkerLinks
from services.gateway.metrics import BatchMetrics, GatewayMetrics
from services.gateway.request.intake import Intake
from services.gateway.request.limits import TenantLimiter
from services.gateway.request.models import LoadableModels
from services.gateway.settings import GatewaySettings

RUNNERS, SUBMISSIONS = "batch-runners.v2", "batch-submissions"


@dataclass(frozen=True, slots=True)
class BatchPorts:
    """The connections of the batch service to the broker and the file store."""

    work: WorkBus
    files: FileStore


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of the gateway that batch lines use."""

    models: Sequence[str]
    intake: Intake
    dispatcher: Dispatcher
    fleet: WorkerLinks
    metrics: GatewayMetrics
    loadable: LoadableModels | None = None


class BatchService:
    def __init__(
        self, ports: BatchPorts, serving: Serving, settings: GatewaySettings, clock: Clock, bounds: TenantBounds
    ) -> None:
        self._work = ports.work
        self._view = JobView(ports.work)
        topics = AllowedTopics(settings.batch_topics)
        check = partial(bounds.check_answer_room, ports.files, self._view)
        self._submissions = Submissions(self._view, clock, settings.cluster, topics, check)
        metrics = BatchMetrics(serving.metrics.registry)
        slots = Slots(lambda: _load(serving), share=settings.batch_share, max_in_flight=settings.batch_max_in_flight)
        served = ServedModels(serving.fleet.views, serving.models, clock)
        self._runner = LaneRunner(
            files=ports.files,
            requester=LineRequester(
                serving.intake, serving.dispatcher, slots, served, clock, loadable=serving.loadable
            ),
            slots=slots,
            clock=clock,
            view=self._view,
            metrics=metrics,
            by_prefix=settings.batch_order == "prefix",
        )
        self._keeper = JobKeeper(
            ports.work,
            ports.files,
            self._view,
            clock,
            max_lines=settings.batch_max_lines,
            max_file_bytes=settings.file_max_bytes,
            max_output_bytes=settings.files_max_bytes,
            metrics=metrics,
            bounds=bounds,
        )
        self._retention = Retention(ports.work, ports.files, self._view, clock, bounds)
        self.router: APIRouter = make_batch_router(
            bus=ports.work,
            files=ports.files,
            view=self._view,
            clock=clock,
            topics=topics,
            max_file_bytes=settings.file_max_bytes,
            max_line_bytes=settings.max_body_bytes,
            bounds=bounds,
        )
        metrics.watch(
            in_flight=lambda: slots.in_flight,
            unfinished_jobs=lambda: len(self._view.unfinished()),
            late_jobs=lambda: sum(bool(job.expected_end and job.expected_end.late) for job in self._view.unfinished()),
            dropped_events=lambda: self._view.dropped_events,
            left_lines=lambda: sum(job.left_lines for job in self._view.standings(clock.now_ns()).values()),
        )

    @asynccontextmanager
    async def running(self, tasks: TaskOwner) -> AsyncIterator[None]:
        """Work on jobs and shares while the context is open.

        When the context ends, other gateways take over the lines that still run.
        """
        own = TaskOwner(tasks.fail)
        own.spawn("batch view", self._view.follow())
        own.spawn("batch keeper", self._work.work(BATCH_JOBS, KEEPERS, self._keeper.work))
        own.spawn("batch submissions", self._work.work(BATCH_SUBMIT, SUBMISSIONS, self._submissions.work))
        own.spawn("batch retention", self._retention.run())
        own.spawn("batch runner", self._work.work(BATCH_SHARES, RUNNERS, self._runner.work))
        try:
            yield
        finally:
            await own.close()


def make_batch(
    ports: BatchPorts | None,
    serving: Serving,
    settings: GatewaySettings,
    clock: Clock,
    *,
    keys: KeyTable | None,
    limiter: TenantLimiter | None,
) -> BatchService | None:
    """Return the batch service, or None if the gateway has no ports for it."""
    store = StoreTotals(settings.files_max_count, settings.files_max_bytes)
    bounds = TenantBounds(keys, limiter, store=store, tenant_files=settings.tenant_files_max_count)
    serving.metrics.watch_slots({"uploads": bounds.uploads})
    return BatchService(ports, serving, settings, clock, bounds) if ports else None


def _load(serving: Serving) -> GatewayLoad:
    links, dispatcher = serving.fleet.links, serving.dispatcher
    return GatewayLoad(
        free=sum(link.decode.free for link in links),
        bound=sum(len(link.running) + link.decode.reserved for link in links),
        people_waiting=dispatcher.people_waiting,
        lines_waiting=dispatcher.waiting - dispatcher.people_waiting,
    )
