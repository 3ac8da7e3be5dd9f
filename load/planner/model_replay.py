"""A log replayed on a pool in virtual time, by the planner's own keeper over workers that only take their time.

It is the prediction that a live run is held against. A worker that gets another model lets its answers end, puts
the old one away and brings the new one up, each as long as a simulated device states. Requests wait for their model
and then run side by side. Gateways publish use, and the planner decides, as often as live.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_ASLEEP,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    HeldModel,
    ModelMove,
    PoolWorker,
    Worker,
)
from libs.lab.models.usage import UsageLog
from libs.stores.catalogue import Catalogued, ModelEntry, ModelUse
from services.planner.models.keeper import Call, Knobs, ModelKeeper

STEP_S: Final = 0.05
REPORT_S: Final = 0.2
PERIOD_S: Final = 0.25
# Closing one worker and opening the next, beside the bytes: measured on a suite, and not compressed.
OPEN_S: Final = 0.2
BEGIN_S: Final = 1_700_000_000.0
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """The speed and memory of a replayed worker."""

    size_bytes: int
    load_s: float
    wake_s: float
    sleep_s: float
    host_models: int
    """Models that fit into a worker's host memory."""


@dataclass(slots=True)
class _Member:
    name: str
    model: str = ""
    epoch: int = 1
    since_s: float = 0.0
    ready_s: float = 0.0
    """When it serves the model that it brings up; 0 if it brings none up."""
    drains: bool = False
    goal: str = ""
    from_host: bool = False
    began_s: float = 0.0
    asleep: deque[str] = field(default_factory=deque)
    running: list[float] = field(default_factory=list)
    last: ModelMove | None = None


@dataclass(slots=True)
class Replayed:
    requests: int = 0
    cold: int = 0
    """Requests whose model no worker had when they arrived."""
    waits_s: list[float] = field(default_factory=list)
    cold_starts: int = 0
    switches: int = 0


class Replay:
    def __init__(self, log: UsageLog, gpus: int, device: Device, knobs: Knobs, *, speed: float) -> None:
        self._log, self._device, self._speed = log, device, speed
        self._members = [_Member(f"pool-{number}") for number in range(1, gpus + 1)]
        self._keeper = ModelKeeper(knobs)
        entries = {name: ModelEntry(name, "builtin:sim", device.size_bytes) for name in log.models}
        self._keeper.take_catalogue(Catalogued(entries))
        self._waiting: dict[str, deque[tuple[float, float]]] = {name: deque() for name in log.models}
        self._arrivals = dict.fromkeys(log.models, 0)
        self._last_s = dict.fromkeys(log.models, 0.0)
        self._found = Replayed()

    def run(self) -> Replayed:
        """Replay to the end of the log's last request."""
        log, at, now_s = self._log, 0, 0.0
        reported_s = decided_s = -1.0
        while at < len(log.t_s) or any(self._waiting.values()):
            cold = False
            while at < len(log.t_s) and log.t_s[at] / self._speed <= now_s:
                cold |= self._arrive(log.models[log.model[at]], float(log.exec_s[at]) / self._speed, now_s)
                at += 1
            for member in self._members:
                self._advance(member, now_s)
            news = False
            if cold or now_s - reported_s >= REPORT_S:
                news, reported_s = self._keeper.take_uses({"gateway": self._uses()}, self._ns(now_s)), now_s
            if news or now_s - decided_s >= PERIOD_S:
                self._keeper.take_workers([self._worker(each) for each in self._members], self._ns(now_s))
                for call in self._keeper.decide(self._ns(now_s)):
                    self._obey(call, now_s)
                decided_s = now_s
            now_s += STEP_S
        self._found.cold_starts = self._keeper.cold_starts
        self._found.switches = self._keeper.switches.total()
        return self._found

    def _arrive(self, model: str, exec_s: float, now_s: float) -> bool:
        self._arrivals[model] += 1
        self._last_s[model] = now_s
        self._found.requests += 1
        for member in self._members:
            if member.model == model and not member.ready_s and not member.drains:
                member.running.append(now_s + exec_s)
                return False
        self._found.cold += 1
        self._waiting[model].append((now_s, exec_s))
        return True

    def _advance(self, member: _Member, now_s: float) -> None:
        member.running = [end_s for end_s in member.running if end_s > now_s]
        if member.drains and not member.running:
            self._leave(member, now_s)
        if not member.ready_s or now_s < member.ready_s:
            return
        member.ready_s, member.since_s = 0.0, now_s
        if member.model:
            took_ns = round((now_s - member.began_s) * SECOND_NS)
            member.last = ModelMove(
                model=member.model, from_host=member.from_host, took_ns=took_ns, unix_ns=self._ns(now_s)
            )
        waiting = self._waiting.get(member.model, deque())
        while waiting:
            came_s, exec_s = waiting.popleft()
            self._found.waits_s.append(now_s - came_s)
            member.running.append(now_s + exec_s)

    def _leave(self, member: _Member, now_s: float) -> None:
        """Put the worker's model away and begin with the next."""
        device, put_away_s = self._device, 0.0
        if member.model:
            put_away_s = device.sleep_s
            member.asleep.append(member.model)
            while len(member.asleep) > device.host_models:
                member.asleep.popleft()
        member.drains, member.model = False, member.goal
        member.from_host = member.goal in member.asleep
        if member.from_host:
            member.asleep.remove(member.goal)
        member.since_s = member.began_s = now_s + put_away_s
        up_s = (device.wake_s if member.from_host else device.load_s) + OPEN_S if member.goal else 0.0
        member.ready_s = now_s + put_away_s + up_s

    def _obey(self, call: Call, now_s: float) -> None:
        member = next(each for each in self._members if each.name == call.worker.id)
        member.goal, member.epoch, member.drains = call.order.model, call.epoch + 1, True
        self._advance(member, now_s)

    def _uses(self) -> dict[str, ModelUse]:
        uses = {}
        for name, waiting in self._waiting.items():
            running = sum(len(each.running) for each in self._members if each.model == name)
            since_ms = round((BEGIN_S + waiting[0][0]) * 1000) if waiting else 0
            last_ms = round((BEGIN_S + self._last_s[name]) * 1000) if self._arrivals[name] else 0
            uses[name] = ModelUse(self._arrivals[name], last_ms, len(waiting), since_ms, running + len(waiting))
        return uses

    def _worker(self, member: _Member) -> Worker:
        loading = member.ready_s > 0 or member.drains
        state = WORKER_STATE_LOADING if loading else WORKER_STATE_READY if member.model else WORKER_STATE_ASLEEP
        device = self._device
        worker = Worker(id=member.name, incarnation=member.epoch, state=state)
        worker.assignment.epoch, worker.assignment.model = member.epoch, member.goal if member.drains else member.model
        worker.pool.CopyFrom(
            PoolWorker(
                since_unix_ns=self._ns(member.since_s),
                asleep=[HeldModel(model=name, size_bytes=device.size_bytes) for name in member.asleep],
                load_bytes_per_s=device.size_bytes / device.load_s,
                wake_bytes_per_s=device.size_bytes / device.wake_s,
                expected_ns=round(max(member.ready_s - member.since_s, 0.0) * SECOND_NS),
                last=member.last,
            )
        )
        return worker

    def _ns(self, now_s: float) -> int:
        return round((BEGIN_S + now_s) * SECOND_NS)
