"""The metrics service's own app, ticks and stream with workers that send to it, and Chromium over its page."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from playwright.async_api import Page
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Compute, Load
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_ROLE_MOVED, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import role_from_name
from libs.contracts.step_row import StepRow, step_columns
from libs.contracts.topics import DECISIONS, STEPS
from libs.runtime.clock import SystemClock
from libs.telemetry.columns import prefill_shares
from libs.testing.suites.browser import browser, listen_for_errors
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import Hub
from tests.metrics_rig import serving_metrics

MS = 1_000_000
BATCH_NS = 100 * MS
WAIT_MS = 10_000
REFUSED = "Failed to load resource"
SECOND_NS = 1_000 * MS


@dataclass
class Worker:
    """A worker that sends a batch every 100 ms, with a step of `busy` of that time."""

    id: str
    role: str
    busy: float
    gpus: int = 1
    node: str = "node-a"
    sequence: int = 0
    silent: bool = False
    leaves: bool = False
    compute: Compute | None = None
    model: str = "sim"
    incarnation: int = 1
    group: str = ""

    def batch(self, start_ns: int, length_ns: int = BATCH_NS) -> StepBatch:
        role, budget = role_from_name(self.role)
        self.sequence += 1
        prefill = self.role == "prefill"
        step = StepRow(
            start_ns, start_ns + int(self.busy * length_ns),
            prefill_tokens=64 * prefill, prefill_sequences=int(prefill), decode_sequences=int(not prefill),
        )  # fmt: skip
        return StepBatch(
            worker_id=self.id, incarnation=self.incarnation, sequence=self.sequence, node=self.node, gpus=self.gpus,
            engine="sim",
            assignment=Assignment(model=self.model, role=role, budget_tokens=budget, epoch=1),
            covered_from_unix_ns=start_ns, covered_to_unix_ns=start_ns + length_ns, steps=step_columns([step]),
            load=Load(running=2, waiting=3, waiting_prefill_tokens=40), last=self.leaves, compute=self.compute,
            group=self.group,
        )  # fmt: skip


class ShiftedClock(SystemClock):
    """A clock with a given offset from the machine's."""

    def __init__(self, shift_ns: int) -> None:
        super().__init__()
        self._shift_ns = shift_ns

    def now_ns(self) -> int:
        return super().now_ns() + self._shift_ns


class LossyHub(Hub):
    """A hub that skips ticks for all readers on request, as it does for a slow one."""

    def __init__(self) -> None:
        super().__init__()
        self.loses = False

    def publish(self, tick: bytes, members: bytes | None = None) -> None:
        if not self.loses:
            super().publish(tick, members)


@dataclass
class Service:
    """The metrics service, with workers that send straight into its state."""

    state: MetricsState
    clock: SystemClock
    hub: LossyHub
    url: str = ""
    workers: dict[str, Worker] = field(default_factory=dict)
    held: list[StepBatch] | None = None
    """The records that a stalled broker holds back; None while it does not stall."""
    sent_to_ns: int | None = None

    def take(self, topic: Any, value: Any) -> None:
        self.state.take(Record(topic, "key", value, 0, 0), self.clock.now_ns())

    def live_through(self, seconds: int) -> None:
        """Let that many seconds of the workers' life pass."""
        now_ns = self.clock.now_ns() // BATCH_NS * BATCH_NS
        self.state.history.resume(now_ns - seconds * SECOND_NS)
        for start_ns in range(now_ns - seconds * SECOND_NS, now_ns, SECOND_NS):
            for worker in self.workers.values():
                self.take(STEPS, worker.batch(start_ns, SECOND_NS))
            self.state.history.advance(start_ns + SECOND_NS)
        self.sent_to_ns = now_ns

    def send(self, batch: StepBatch) -> None:
        """Send through the broker."""
        if self.held is None:
            self.take(STEPS, batch)
        else:
            self.held.append(batch)

    def catch_up(self) -> None:
        """End the stall of the broker, which then delivers the held records."""
        held, self.held = self.held or [], None
        for batch in held:
            self.take(STEPS, batch)

    async def send_forever(self) -> None:
        start_ns = self.sent_to_ns or self.clock.now_ns() // BATCH_NS * BATCH_NS
        while True:
            while start_ns + BATCH_NS <= self.clock.now_ns():
                for worker in self.workers.values():
                    if not worker.silent:
                        self.send(worker.batch(start_ns))
                start_ns += BATCH_NS
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    *workers: Worker, settings: MetricsSettings | None = None, lived_s: int = 0, port: int = 0, shift_ns: int = 0
) -> AsyncIterator[Service]:
    clock, hub = ShiftedClock(shift_ns), LossyHub()
    state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
    service = Service(state, clock, hub, workers={worker.id: worker for worker in workers})
    if lived_s:
        service.live_through(lived_s)
    sending = service.send_forever()
    async with serving_metrics(
        state, clock, hub, sending, settings=settings or MetricsSettings(), port=port
    ) as service.url:
        yield service


@asynccontextmanager
async def looking(service: Service, path: str = "/", *, refused: bool = False, **options: Any) -> AsyncIterator[Page]:
    """Open the page, which must report no error; `refused` excepts requests that the service refuses as expected."""
    async with browser() as running:
        page = await running.new_page(**options)
        errors = listen_for_errors(page)
        await page.goto(service.url + path)
        yield page
        assert [each for each in errors if not (refused and REFUSED in each)] == []


async def figures(page: Page, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the figures at the top of the page, once a condition holds for them."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while not ((shown := await _figures(page)) and holds(shown)):
            await asyncio.sleep(0.02)
        return shown


async def _figures(page: Page) -> dict[str, Any] | None:
    data = json.loads(await page.evaluate("JSON.stringify({...document.getElementById('figures').dataset})"))
    if not data:
        return None
    names = ("covered", "prefill", "decode", "kv_wait", "idle")
    data["gpu_ns"] = dict(zip(names, map(int, data["gpuNs"].split(",")), strict=True))
    data["coverage"] = float(data["coverage"])
    return data


async def occupancy(service: Service, shown: dict[str, Any]) -> dict[str, Any]:
    """Return what the API reports for the window that the page shows."""
    window = {"window": f"{shown['windowMs']}ms", "end_unix_ms": shown["asOfUnixMs"]}
    async with httpx.AsyncClient() as http:
        body: dict[str, Any] = (await http.get(f"{service.url}/v1/occupancy", params=window)).json()
    assert body["as_of_unix_ns"] == int(shown["asOfUnixMs"]) * MS
    return body


def half_busy() -> tuple[Worker, Worker]:
    return Worker("prefill-0", "prefill", 0.6, gpus=8), Worker("decode-0", "decode", 0.3)


def role_moved(service: Service, worker_id: str, role: str, reason: str = "prompts wait", *, ago_ms: int = 0) -> None:
    """Publish that a worker has moved, as the planner would."""
    now_ns = service.clock.now_ns() - ago_ms * 1_000_000
    assigned, budget = role_from_name(role)
    service.take(
        DECISIONS,
        Decision(
            planner_id="planner", incarnation=1, sequence=now_ns, decided_unix_ns=now_ns, action=ACTION_ROLE_MOVED,
            reason=reason, actor="somebody", worker_id=worker_id,
            assignment=Assignment(model="sim", role=assigned, budget_tokens=budget, epoch=2),
        ),
    )  # fmt: skip
