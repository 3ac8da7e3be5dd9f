"""The command `fulcrum lab calibrate`: writes the measurements of a running suite's workers as a profile for the
lab.
"""

import asyncio
import json
import time
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import structlog

from libs.bus.clients import quiet_client_log
from libs.bus.port import Bus
from libs.cli.find import find_one_suite, get_json
from libs.cli.lab.runs import noting
from libs.contracts.errors import FulcrumError, InvalidRequest, StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import TunePrefillRequest
from libs.contracts.topics import STEPS
from libs.lab.hardware import Hardware, LearnedWorker, calibrated, write_profile
from libs.launch.ready import Ready
from libs.perfmodel.learner import FittedModel
from libs.perfmodel.wire import fitted_model
from libs.policy.worker.handing_over import TransferSpeed
from libs.runtime.net.access import admin_token
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings, load_settings
from libs.worker.admin_client import WorkerAdmin

# KV transfers of this period show the speed of the link.
LOOK_BACK_S: Final = 120.0
# An idle worker reports about once a second; a worker that is silent for this long is left out.
WAIT_S: Final = 10.0
ROUND_TRIPS: Final = 15


@dataclass(slots=True)
class Reported:
    """The telemetry of one incarnation of a worker."""

    incarnation: int
    transfers: TransferSpeed
    fitted: FittedModel | None = None
    covered_to_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The answer of a worker to a Describe call."""

    worker: Worker
    chunk_tokens: int
    round_trips_ms: list[float] = field(default_factory=list)


def calibrate(*, ready_file: Path | None, worker: str | None, out: Path | None, as_json: bool) -> None:
    """Write the profile of a suite's workers, or of those of the same kind as `worker`.

    Raise StartupError and InvalidRequest.
    """
    suite = find_one_suite(ready_file)
    if not suite.kafka:
        raise StartupError("no suite runs here: start one with `fulcrum up`, or name its ready file with --ready")
    with noting() as notes_shown:
        notes_shown.doing("asking the workers")
        workers = learned_of_suite(suite)
    if worker is not None:
        like = next((each.kind for each in workers if each.worker_id == worker), None)
        if like is None:
            there = ", ".join(each.worker_id for each in workers) or "none"
            raise StartupError(f"no worker {worker!r} has reported what it has learned; these have: {there}")
        workers = [each for each in workers if each.kind == like]
    name = out.stem if out is not None else "live"
    hardware, notes = calibrated(name, workers)
    path = out or Path(f"{name}.json")
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    source = f"{workers[0].model} on {workers[0].device}: learned by {len(workers)} workers, {made}"
    write_profile(hardware, path, source=source, notes=notes)
    if as_json:
        print(json.dumps({"file": str(path), **json.loads(path.read_text())}))
    else:
        print(_words(hardware, workers, notes, path))


def learned_of_suite(suite: Ready) -> list[LearnedWorker]:
    """Return the learned figures of each worker that answers. Raise StartupError if there are none."""
    listed: list[dict[str, Any]] = get_json(suite.planner, "/v1/workers")
    return asyncio.run(_learned(suite, listed))


async def read_reported(
    bus: Bus, incarnations: Mapping[str, int], block_tokens: Mapping[str, int], began_ns: int, wait_s: float = WAIT_S
) -> dict[str, Reported]:
    """Return by worker the telemetry of the `LOOK_BACK_S` up to `began_ns`.

    Return once all workers have reported up to then, or after `wait_s`.
    """
    found = {
        worker_id: Reported(incarnation, TransferSpeed(block_tokens[worker_id]))
        for worker_id, incarnation in incarnations.items()
    }
    since_ns = began_ns - round(LOOK_BACK_S * 1e9)
    async with aclosing(cast(Any, bus.subscribe([STEPS], since_unix_ns=since_ns))) as records:
        try:
            async with asyncio.timeout(wait_s):
                async for record in records:
                    _take(found, cast(StepBatch, record.value))
                    if all(each.covered_to_ns >= began_ns for each in found.values()):
                        break
        except TimeoutError:
            pass
    return {worker_id: reported for worker_id, reported in found.items() if reported.fitted is not None}


def _take(found: dict[str, Reported], batch: StepBatch) -> None:
    reported = found.get(batch.worker_id)
    if reported is None or reported.incarnation != batch.incarnation:
        return
    for transfer in batch.kv_transfers:
        reported.transfers.arrived(transfer.blocks, transfer.end_unix_ns - transfer.start_unix_ns)
    if batch.HasField("step_time"):
        reported.fitted = fitted_model(batch.step_time) or reported.fitted
    reported.covered_to_ns = max(reported.covered_to_ns, batch.covered_to_unix_ns)


async def _learned(suite: Ready, listed: Collection[dict[str, Any]]) -> list[LearnedWorker]:
    """Return the learned figures of workers that both answer and send telemetry; neither suffices alone."""
    from libs.bus.kafka import KafkaBus  # noqa: PLC0415 (a client of Kafka, which no test needs)

    quiet_client_log()
    began_ns = time.time_ns()
    described: dict[str, WorkerDescription] = {}
    for each in listed:
        try:
            described[each["id"]] = await _describe(suite, each)
        except FulcrumError as error:
            structlog.get_logger().warning("worker is left out", worker=each["id"], why=error.message)
    if not described:
        raise StartupError(f"no worker of the suite at {suite.gateway} answers: see `fulcrum workers`")
    bus = KafkaBus(suite.kafka, suite.cluster, "fulcrum lab calibrate")
    try:
        reported = await read_reported(
            bus,
            {worker_id: each.worker.incarnation for worker_id, each in described.items()},
            {worker_id: max(each.worker.capabilities.block_size_tokens, 1) for worker_id, each in described.items()},
            began_ns,
        )
    finally:
        await bus.close()
    return [learned_of(described[worker_id], each) for worker_id, each in reported.items()]


def learned_of(described: WorkerDescription, reported: Reported) -> LearnedWorker:
    """Combine one worker's own answer with its telemetry."""
    worker, can = described.worker, described.worker.capabilities
    assert reported.fitted is not None
    return LearnedWorker(
        worker_id=worker.id,
        engine=worker.engine,
        model=worker.assignment.model,
        device=worker.device,
        gpus=max(worker.gpus, 1),
        fitted=reported.fitted,
        chunk_tokens=described.chunk_tokens,
        kv_blocks=can.kv_blocks,
        kv_block_bytes=can.kv_block_bytes,
        block_tokens=max(can.block_size_tokens, 1),
        max_sequences=max(can.max_sequences, 1),
        kv_token_ns=reported.transfers.token_ns,
        round_trip_ms=median(described.round_trips_ms) if described.round_trips_ms else 0.0,
    )


async def _describe(suite: Ready, listed: dict[str, Any]) -> WorkerDescription:
    settings = load_settings(CommonSettings)
    async with make_channel(settings, listed["address"]) as channel:
        admin = WorkerAdmin(channel, listed["id"], admin_token(settings, listed["address"], suite.token))
        worker = (await admin.describe()).worker
        try:
            chunk_tokens = (await admin.tune_prefill(TunePrefillRequest(kept=True))).chunk_tokens
        except InvalidRequest:  # without a measurement the worker uses its settings
            chunk_tokens = worker.capabilities.chunk_tokens
        trips_ms = []
        for _ in range(ROUND_TRIPS):
            start_s = time.perf_counter()
            await admin.describe()
            trips_ms.append((time.perf_counter() - start_s) * 1000)
    return WorkerDescription(worker, chunk_tokens, trips_ms)


def _words(hardware: Hardware, workers: Collection[LearnedWorker], notes: Collection[str], path: Path) -> str:
    model = hardware.profile.step_time
    link = f"{hardware.link_gbps:,.1f} Gbit/s" if hardware.link_gbps else "not seen"
    hop = f"{hardware.hop_ms:.2f} ms" if hardware.hop_ms else "not measured"
    lines = [
        f"{len(workers)} workers: a prompt of 512 tokens in a step of {model.chunks_ns(512, 512.0**2) / 1e6:.1f} ms,"
        f" one sequence decodes in {(model.reading_ns(1) + model.decode_sequence_ns) / 1e6:.2f} ms a token;"
        f" {hardware.chunk_tokens} prompt tokens a step,"
        f" KV link {link}, a hop {hop}",
        *notes,
        f"Use it: fulcrum lab run --profile {path} --trace FILE",
    ]
    return "\n".join(lines)
