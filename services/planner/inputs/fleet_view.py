"""Columns of what metrics services report of the registered workers: loads, time by window, step times. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load, StepTime, Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import MAX_COEFFICIENT_NS, fitted_model
from libs.telemetry.fleet_loads import COLUMNS, MOST_COUNTED, WINDOW_NS, columns_of, window_of
from services.planner.inputs.roster import Bools, Ints, Uints, WorkerColumns

# Metrics services remembered; the one that published longest ago is dropped.
MAX_METRICS_SERVICES: Final = 16
# An older message comes from the broker's log and says nothing about the present.
OLD_NS: Final = 30_000_000_000
# Indices of the last axis of `times`.
COVERED, PREFILL, DECODE = range(3)


class MessageOutcome(StrEnum):
    COUNTED = "counted"
    MALFORMED = "malformed"
    OLD = "old"


@dataclass(slots=True)
class _MetricsService:
    """A metrics service and the places of its workers in the roster."""

    ids: Sequence[str] = ()
    roster: WorkerColumns | None = None
    places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Place of each of its workers, or -1 if it is not registered."""


class FleetView:
    """Telemetry as [workers] arrays in the order of `roster`. Reports of a worker's earlier incarnations are
    ignored.
    """

    def __init__(self, window_ns: int, lag_ns: int) -> None:
        self.roster = WorkerColumns((), "")
        self.loads: Uints = np.zeros((len(COLUMNS), 0), np.uint64)
        """[columns, workers] the newest report of each worker, by `COLUMNS`."""
        self._columns: dict[str, Ints] = {}
        """Signed copies of the columns that were read since the last message, by name."""
        self.heard_ns: Ints = np.zeros(0, np.int64)
        """[workers] local time of the last newer report; 0 if this incarnation has reported nothing."""
        self.step_times: list[FittedModel | None] = []
        self.seen_steps: Ints = np.zeros((len(StepKind), 0), np.int64)
        """[kinds, workers] steps fitted to the step time, plus one; 0 for a worker that reported none."""
        self.kv_token_ns: NDArray[np.float64] = np.zeros(0)
        """[workers] time to receive the KV of one token; 0 if unknown."""
        self.revision = 0
        """Incremented with every change of a step time."""
        self._step_bytes: list[bytes] = []
        # Rounded down to whole windows, but at least one.
        self.window_ns = max(window_ns // WINDOW_NS, 1) * WINDOW_NS
        self.works = False
        """Whether the last message reported anything running, waiting or computed."""
        self._slots = (self.window_ns + lag_ns) // WINDOW_NS + 12
        self._times: NDArray[np.int32] = np.zeros((self._slots, 0, 3), np.int32)
        """[windows, workers, 3] int32 ns; a ring indexed by window number."""
        self._numbers: Ints = np.full(self._slots, -1, np.int64)
        self._services: dict[str, _MetricsService] = {}
        self.taken = Counter(dict.fromkeys(MessageOutcome, 0))
        self.latest_arrival_ns: int | None = None

    def take_roster(self, roster: WorkerColumns) -> None:
        """Replace the roster, keeping the telemetry of workers that stay in the same incarnation."""
        before, self.roster = self.roster, roster
        olds = np.array([before.places.get(name, -1) for name in roster.ids], np.int64)
        stays = olds >= 0
        stays[stays] = before.incarnation[olds[stays]] == roster.incarnation[stays]
        count, olds = len(roster), olds[stays]
        loads, heard = np.zeros((len(COLUMNS), count), np.uint64), np.zeros(count, np.int64)
        loads[:, stays], heard[stays] = self.loads[:, olds], self.heard_ns[olds]
        times = np.zeros((self._slots, count, 3), np.int32)
        times[:, stays] = self._times[:, olds]
        seen = np.zeros((len(StepKind), count), np.int64)
        seen[:, stays] = self.seen_steps[:, olds]
        kv_token_ns = np.zeros(count)
        kv_token_ns[stays] = self.kv_token_ns[olds]
        self.kv_token_ns = kv_token_ns
        models: list[FittedModel | None] = [None] * count
        raw = [b""] * count
        for new, old in zip(np.flatnonzero(stays).tolist(), olds.tolist(), strict=True):
            models[new], raw[new] = self.step_times[old], self._step_bytes[old]
        self.loads, self.heard_ns, self._times, self.step_times, self._step_bytes = loads, heard, times, models, raw
        self.seen_steps = seen
        self._columns.clear()
        self.revision += 1

    def take(self, message: FleetLoads, now_ns: int) -> MessageOutcome:
        """Record a message received at `now_ns` and return whether it counted."""
        taken = self._take(message, now_ns)
        self.taken[taken] += 1
        return taken

    def _take(self, message: FleetLoads, now_ns: int) -> MessageOutcome:
        if message.told_unix_ns < now_ns - OLD_NS:
            return MessageOutcome.OLD
        ids = list(message.worker_ids)
        try:
            loads = columns_of(message, len(ids))
            windows = [window_of(each, len(ids)) for each in message.windows]
        except ValueError:
            return MessageOutcome.MALFORMED
        self.latest_arrival_ns = now_ns
        places = self._places(message.metrics_id, ids)
        there = places >= 0
        there[there] = loads[COLUMNS.index("incarnations")][there] == self.roster.incarnation[places[there]]
        at = places[there]
        covered = COLUMNS.index("covered_to_unix_ns")
        newer = (loads[covered][there] > self.loads[covered][at]) | (self.heard_ns[at] == 0)
        busy = any((times[:, PREFILL:] > 0).any() for _, _, times in windows)
        self.works = busy or bool(loads[COLUMNS.index("running") : COLUMNS.index("free_kv_blocks")].any())
        self.loads[:, at[newer]] = loads[:, there][:, newer]
        self._columns.clear()
        self.heard_ns[at[newer]] = now_ns
        for start_ns, of, times in windows:
            self._take_window(start_ns, places[of], there[of], times, now_ns)
        for each in message.step_times:
            if each.worker < len(ids) and there[each.worker]:
                self._take_step_time(int(places[each.worker]), each.step_time)
        return MessageOutcome.COUNTED

    def role_now(self) -> tuple[Ints, Ints, Uints]:
        """Return role, budget and epoch of each worker. Telemetry shows a change before the registry does."""
        roster = self.roster
        epoch = self.loads[COLUMNS.index("epochs")]
        newer = epoch > roster.epoch
        role = np.where(newer, self.column("roles"), roster.role)
        budget = np.where(newer, self.column("budget_tokens"), roster.budget_tokens)
        return role, budget, np.where(newer, epoch, roster.epoch)

    def epoch(self, place: int) -> int:
        """Return the newest known epoch of one worker's assignment."""
        return max(int(self.loads[COLUMNS.index("epochs"), place]), int(self.roster.epoch[place]))

    def column(self, name: str) -> Ints:
        """Return a [workers] column by name. Values are small enough for the sum of all to fit 64 bits."""
        if name not in self._columns:
            self._columns[name] = self.loads[COLUMNS.index(name)].astype(np.int64)
        return self._columns[name]

    def is_known(self) -> Bools:
        """Return whether each worker's present incarnation has reported anything."""
        return self.heard_ns > 0

    def load(self, place: int) -> Load | None:
        """Return a worker's last reported load, or None if it has reported nothing."""
        if not self.heard_ns[place]:
            return None
        words = {name: int(self.loads[COLUMNS.index(name), place]) for name in LOAD_COLUMNS}
        return Load(**words)

    def times_ns(self, end_ns: int) -> Ints:
        """Return [workers, 3] covered, prefill and decode time in the last `window_ns` of whole windows ended by
        `end_ns`.
        """
        last = end_ns // WINDOW_NS
        first = last - self.window_ns // WINDOW_NS
        wanted = (self._numbers >= first) & (self._numbers < last)
        found: Ints = self._times[wanted].sum(axis=0, dtype=np.int64)
        return found

    def _places(self, metrics_id: str, ids: Sequence[str]) -> Ints:
        service = self._services.pop(metrics_id, None) or _MetricsService()
        if len(self._services) >= MAX_METRICS_SERVICES:
            del self._services[next(iter(self._services))]
        self._services[metrics_id] = service
        if service.roster is not self.roster or service.ids != ids:
            known = self.roster.places
            service.ids, service.roster = ids, self.roster
            service.places = np.array([known.get(name, -1) for name in ids], np.int64)
        return service.places

    def _take_window(self, start_ns: int, places: Ints, there: Bools, times: NDArray[np.int32], now_ns: int) -> None:
        number = start_ns // WINDOW_NS
        if number < now_ns // WINDOW_NS - self._slots or number > now_ns // WINDOW_NS + self._slots:
            return
        slot = number % self._slots
        if self._numbers[slot] > number:
            return
        if self._numbers[slot] < number:
            self._numbers[slot] = number
            self._times[slot] = 0
        at, new = places[there], times[there]
        fuller = new[:, COVERED] >= self._times[slot, at, COVERED]
        self._times[slot, at[fuller]] = new[fuller]

    def _take_step_time(self, place: int, message: StepTime) -> None:
        raw = message.SerializeToString()
        if raw != self._step_bytes[place]:
            fitted = fitted_model(message)
            self._step_bytes[place], self.step_times[place] = raw, fitted
            known = 0.0 < message.kv_token_ns < MAX_COEFFICIENT_NS
            self.kv_token_ns[place] = message.kv_token_ns if known else 0.0
            for number, kind in enumerate(StepKind):
                steps = getattr(fitted, kind.value).steps if fitted is not None else -1
                self.seen_steps[number, place] = min(steps, MOST_COUNTED) + 1
            self.revision += 1


LOAD_COLUMNS: Final = (
    "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions",
    "recomputed_tokens", "pool_faults",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A registered worker and its load, which is None until its present incarnation reports."""

    worker: Worker
    load: Load | None
    coverage: float
    """Share of the window that its telemetry covers, 0..1."""


def observed_workers(view: FleetView, end_ns: int) -> list[ObservedWorker]:
    """Return every registered worker over the window that ends at `end_ns`."""
    covered_ns = view.times_ns(end_ns)[:, COVERED].tolist()
    return [
        ObservedWorker(worker, view.load(place), covered_ns[place] / view.window_ns)
        for place, worker in enumerate(view.roster.workers)
    ]
