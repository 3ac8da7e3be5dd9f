"""Tests of well-formed records with one field at a limit of its type: services survive and serve others."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from libs.bus.codec import LOG_EVERY_S, SCHEMA_HEADER, UNREADABLE, SkippedRecords, decode
from libs.contracts import metric_names as names
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Created, JobEvent, Result, Share
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Worker
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandCount
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.ranges import RANGES, READ_RARELY, fault_of
from libs.contracts.topics import (
    ALL,
    AUDIT,
    BATCH_JOBS,
    BATCH_RESULTS,
    BATCH_SHARES,
    BATCH_SUBMIT,
    CAPACITY,
    DECISIONS,
    DEMAND,
    LOADS,
    QUEUES,
    REQUESTS,
    SILENCES,
    STEPS,
    WINDOWS,
    Topic,
)
from libs.demand.counts import MAX_ROWS, Counts, DemandKey
from libs.demand.wire import MOST_SPREAD, DemandFold, Mark
from libs.filestore.local import LocalFiles
from libs.runtime.clock import SystemClock
from libs.runtime.tasks import TaskOwner
from libs.runtime.transport import SystemTransport
from libs.telemetry.gateways import ModelBacklog
from libs.telemetry.rollups import TIERS
from libs.testing.batch.work import MemoryWork, created, running, store
from libs.testing.memory.broker import Incoming, MemoryBroker, TooLarge
from libs.testing.memory.bus import MemoryBus
from libs.testing.messages import extremes, plain, plausible_fields
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from services.gateway.batch.begin import AllowedTopics, Submissions
from services.gateway.batch.job import ShareNote
from services.gateway.batch.routes import show_batch
from services.gateway.batch.view import JobView
from services.metrics.demand.keeping import FINE, MOST_IN_BIN, DemandFile
from services.metrics.history import HistoryFile
from services.metrics.run import MetricsPorts, open_metrics
from services.metrics.settings import MetricsSettings
from services.planner.run import PlannerPorts, open_planner
from services.planner.settings import PlannerSettings
from tests.unit.batch.test_batch_keeper import answer, keeper
from tests.unit.batch.test_batch_runner import LINES, SHARES, a_runner, put_out

CLUSTER: Final = "extreme"
MOST_CPU_S: Final = 15.0
"""Of a test, and it takes less than one: a single share took 19 s, a single record of demand 14."""
METRICS_READS: Final = (STEPS, QUEUES, REQUESTS, DECISIONS, DEMAND, WINDOWS, SILENCES, AUDIT)
METRICS_PATHS: Final = (
    "/v1/status", "/v1/occupancy", "/v1/demand", "/v1/events", "/v1/alerts", "/v1/audit?limit=1000", "/v1/decisions",
    "/v1/requests/summary?window=10m", "/metrics",
)  # fmt: skip
NO_SOCKET: Any = None


def records(topic: Topic, now_ns: int) -> Iterator[bytes]:
    """Each extreme of a topic on the wire; step batches follow one another, so that none is a repeated one."""
    for number, (_, message) in enumerate(extremes(plain(topic.value, plausible_fields(now_ns)))):
        if isinstance(message, StepBatch) and message.sequence == 1:
            message.sequence += number
        yield message.SerializeToString()


def taken(topic: Topic, now_ns: int) -> list[Message]:
    """Return the extremes of a topic that readers do not skip."""
    schema = [(SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode())]
    decoded = [decode(topic, value, schema) for value in records(topic, now_ns)]
    return [each for each in decoded if not isinstance(each, str)]


class Broker(MemoryBroker):
    """A broker that accepts records of strangers."""

    def put(self, topic: Topic, value: bytes) -> None:
        schema = ((SCHEMA_HEADER, topic.value.DESCRIPTOR.full_name.encode()),)
        with suppress(TooLarge):
            self.append(Incoming(topic.name(CLUSTER), b"k", value, schema, time.time_ns()))


class CapturingTransport(SystemTransport):
    """A transport that records the app that would be served."""

    app: Any = None

    @asynccontextmanager
    async def http(self, app: Any, _sock: Any, **_: Any) -> AsyncIterator[str]:  # type: ignore[override]
        self.app = app
        yield "http://127.0.0.1"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1")


@asynccontextmanager
async def metrics(folder: Path, bus: MemoryBus, tasks: TaskOwner) -> AsyncIterator[httpx.AsyncClient]:
    """A metrics service that keeps history, one of several that share the work."""
    settings = MetricsSettings.model_validate({"cluster": CLUSTER, "shared": True})
    transport = CapturingTransport(settings)
    history = HistoryFile(folder / "history", CLUSTER, TIERS[1:])
    ports = MetricsPorts(bus, history, DemandFile(str(folder / "demand"), CLUSTER))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        opening = open_metrics(
            settings=settings, ports=ports, sock=NO_SOCKET, clock=SystemClock(), tasks=tasks, transport=transport
        )
        await stack.enter_async_context(opening)
        yield await stack.enter_async_context(transport.client())


def of_others(now_ns: int) -> list[tuple[Topic, Message]]:
    """Records of another tenant by a well-behaved gateway."""
    count = DemandCount(model="honest", service_class="online", tenant="b", requests=7, known_requests=7)
    return [
        (REQUESTS, REQUESTS.value(request_id="r", model="honest", arrival_unix_ns=now_ns, outcome=1)),
        (DEMAND, DEMAND.value(gateway_id="honest", incarnation=1, told_unix_ns=now_ns, counts=[count])),
    ]


@pytest.mark.parametrize("topic", METRICS_READS, ids=lambda topic: topic.stem)
async def test_metrics_survives_any_well_formed_record_and_counts_others(topic: Topic, tmp_path: Path) -> None:
    broker, tasks = Broker(), TaskOwner()
    bus, began_s = MemoryBus(broker, CLUSTER), time.thread_time()
    async with metrics(tmp_path, bus, tasks) as http:
        await until(lambda: broker.partitions(topic.name(CLUSTER)), what="topics")
        for value in records(topic, time.time_ns()):
            broker.put(topic, value)
        for each, message in of_others(time.time_ns()):
            broker.put(each, message.SerializeToString())
        text = ""
        while f'{names.REQUESTS_TOTAL}{{model="honest",outcome="ok"}} 1.0' not in text:
            await asyncio.sleep(0.02)
            assert tasks.error is None
            text = (await http.get("/metrics")).text
        for path in METRICS_PATHS:
            got = await http.get(path)
            assert got.status_code == 200, (path, got.text)
        assert tasks.error is None
        assert {stem for stem, _ in bus.stats().skipped} == {topic.stem}
        assert f'{names.BUS_SKIPPED_TOTAL}{{reason="' in text
    file = DemandFile(str(tmp_path / "demand"), CLUSTER)
    assert [mark for (gateway, _), mark in file.marks().items() if gateway == "honest"], "kept over a restart"
    file.close()
    assert time.thread_time() - began_s < MOST_CPU_S


@pytest.mark.parametrize("topic", [LOADS, QUEUES, CAPACITY], ids=lambda topic: topic.stem)
async def test_a_planner_survives_any_well_formed_record_and_reads_others(topic: Topic) -> None:
    settings = PlannerSettings.model_validate({"cluster": CLUSTER})
    tasks, broker, clock, transport = TaskOwner(), Broker(), SystemClock(), CapturingTransport(settings)
    bus, began_s = MemoryBus(broker, CLUSTER), time.thread_time()
    registry = ListedRegistry([Worker(id="a", incarnation=1, address="127.0.0.1:1", state=WORKER_STATE_READY)])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        stack.push_async_callback(tasks.close)
        ports = PlannerPorts(bus, registry)
        opening = open_planner(
            settings=settings, ports=ports, sock=NO_SOCKET, clock=clock, tasks=tasks, transport=transport
        )
        planner = await stack.enter_async_context(opening)
        http = await stack.enter_async_context(transport.client())
        await until(lambda: broker.partitions(topic.name(CLUSTER)), what="topics")

        def waiting(model: str) -> ModelBacklog | None:
            """Of a model of the honest gateway, which says it until it is heard: readers begin at the end."""
            queue = QUEUES.value(gateway_id=model, told_unix_ns=time.time_ns())
            queue.queues.add(model=model, prefill_requests=3, prefill_tokens=9)
            broker.put(QUEUES, queue.SerializeToString())
            return (planner.state.gateways.waiting(clock.now_ns()) or {}).get(model)

        await until(lambda: waiting("first"), what="a reader")
        for value in records(topic, time.time_ns()):
            broker.put(topic, value)
        await until(lambda: waiting("honest"), what="the honest gateway's report")
        assert waiting("honest") == ModelBacklog(3, 9, hopeful_tokens=9)
        await until(lambda: bus.stats().skipped, what="skipped records")
        for path in ("/v1/workers", "/v1/decisions", "/v1/mode", "/metrics"):
            assert (await http.get(path)).status_code == 200, path
        assert tasks.error is None
    assert time.thread_time() - began_s < MOST_CPU_S


@pytest.mark.slow
async def test_shares_of_any_values_do_not_prevent_answers_of_other_lines(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    now_ns, began_s, view = time.time_ns(), time.thread_time(), JobView(work)
    await work.send(BATCH_JOBS, JobEvent(job_id="a", at_unix_ns=now_ns, created=Created(expires_unix_ns=now_ns * 2)))
    for share in taken(BATCH_SHARES, now_ns):
        for topic in ("output_topic", "error_topic"):  # the bus in memory has no clients' topics
            share.ClearField(topic)
        await work.send(BATCH_SHARES, share)
    await put_out(work, files)
    async with running(view.follow(), a_runner(files, view, 10**9).work(work)):
        await until(lambda: answers(work)["job"] == LINES * SHARES, timeout_s=60, what="all answers of others")
    assert time.thread_time() - began_s < MOST_CPU_S


async def test_a_share_of_an_unknown_job_does_not_run(tmp_path: Path) -> None:
    work, files = MemoryWork(BATCH_SHARES), LocalFiles(tmp_path / "files", max_bytes=10**6)
    view = JobView(work)
    async with running(view.follow(), a_runner(files, view, 10**9).work(work)):
        await work.send(BATCH_SHARES, Share(job_id="forged", lines=9, endpoint="/v1/completions"))
        await until(lambda: work.next_offset == 1, what="the forged share's end")
    assert not work.values_of(BATCH_RESULTS)


@pytest.mark.slow
async def test_events_and_answers_of_any_values_do_not_prevent_the_end_of_other_jobs(tmp_path: Path) -> None:
    work, files, now_ns = MemoryWork(BATCH_JOBS), await store(tmp_path), time.time_ns()
    view, began_s = JobView(work), time.thread_time()
    async with running(view.follow(), keeper(work, files, view).work(work)):
        for event in taken(BATCH_JOBS, now_ns):
            await work.send(BATCH_JOBS, event)
        for result in taken(BATCH_RESULTS, now_ns):
            await work.send(BATCH_RESULTS, result)
        await work.send(BATCH_JOBS, created("honest", input_file_id="file-1"))
        shares = work.values_of
        await until(lambda: "honest" in {getattr(each, "job_id", "") for each in shares(BATCH_SHARES)}, timeout_s=60)
        await answer(work, "honest")
        await until(lambda: (job := view.get("honest")) and job.finished, timeout_s=60, what="the honest job's end")
        assert [show_batch(job) for job in view.jobs()]
    assert time.thread_time() - began_s < MOST_CPU_S


async def test_submissions_of_any_bytes_do_not_prevent_other_submissions() -> None:
    work, now_ns = MemoryWork(BATCH_SUBMIT), time.time_ns()
    view = JobView(work)
    submissions = Submissions(view, SystemClock(), CLUSTER, AllowedTopics(""))
    async with running(view.follow(), submissions.work(work)):
        bodies = taken(BATCH_SUBMIT, now_ns)
        for body in bodies:
            await work.send(BATCH_SUBMIT, body)
        text = b'{"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}'
        await work.send(BATCH_SUBMIT, BATCH_SUBMIT.value(body=text))
        await until(lambda: len(view.unfinished()) == 1, what="the honest job")
        assert len(view.jobs()) == len(bodies) + 1


def answers(work: MemoryWork) -> Counter[str]:
    """Return the answers by job."""
    return Counter(each.job_id for each in work.values_of(BATCH_RESULTS) if isinstance(each, Result))


def test_every_topic_accepts_ordinary_records_and_every_entry_names_a_field() -> None:
    fields: dict[str, set[str]] = {}

    def walk(descriptor: Any) -> None:
        name = descriptor.full_name.removeprefix("fulcrum.")
        if name not in fields:
            fields[name] = {field.name for field in descriptor.fields}
            for part in filter(None, (field.message_type for field in descriptor.fields)):
                walk(part)

    for topic in ALL:
        walk(topic.value.DESCRIPTOR)
        message = plain(topic.value, plausible_fields(time.time_ns()))
        assert fault_of(message, message.ByteSize()) == "", topic.stem
    walk(Worker.DESCRIPTOR)
    for name, entries in (*RANGES.items(), *READ_RARELY.items()):
        assert set(entries) <= fields[name], name


def test_many_skipped_records_log_one_line() -> None:
    now_s = [100.0]
    skipped = SkippedRecords(lambda: now_s[0])
    with capture_logs() as lines:
        for offset in range(1_000):
            skipped.add(STEPS, "StepBatch.gpus", 0, offset)
        now_s[0] += LOG_EVERY_S
        skipped.add(STEPS, UNREADABLE, 0, 1_000)
    assert [line["skipped"] for line in lines] == [1, 1_000]
    assert skipped.counts == {("steps.v2", "StepBatch.gpus"): 1_000, ("steps.v2", UNREADABLE): 1}


def test_the_cost_of_a_demand_record_is_bounded() -> None:
    rows = {DemandKey(f"m{number}", "online", "a"): Counts(*[2**49] * 7) for number in range(2 * MAX_ROWS)}
    fold = DemandFold(60 * 10**9)
    fold.take(("a", 1), Mark(time.time_ns(), rows))
    assert 0 < sum(len(delta.rows) for delta in fold.take_deltas().values()) <= MOST_SPREAD + len(rows)


def test_a_bin_fits_its_sums_even_if_every_gateway_reports_the_maximum() -> None:
    file, fold, key = DemandFile(":memory:", CLUSTER), DemandFold(60 * 10**9), DemandKey("m", "online", "a")
    for number in range(1_000):
        fold.take((f"g{number}", 60 * 10**9), Mark(120 * 10**9, {key: Counts(*[2**49] * 7)}))
    file.save(fold.take_deltas(), fold.newest())
    assert file.read(FINE, 1, 2, 60 * 10**9).rows[key].max() == MOST_IN_BIN
    file.close()


@pytest.mark.parametrize("note", ["no note", "0x1/0", "-1/0", "1/2/3", "f" * 5_000 + "/0", "ff/ff/ff", "\u0661/0"])
def test_an_invalid_note_means_that_no_line_is_answered(note: str) -> None:
    assert ShareNote.read(note, 4) == ShareNote(4)
    assert ShareNote.read("ff/3", 4) == ShareNote(4, 0b1111, 0b0011)
