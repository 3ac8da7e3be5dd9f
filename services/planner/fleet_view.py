"""The registered workers and the reports of metrics services as arrays: loads, windows, step times. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    Load,
    StepTime,
    Worker,
)
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads
from libs.contracts.protocol import Unpaired, unpaired
from libs.contracts.roles import PLANNERS
from libs.demand.wire import plan_of
from libs.perfmodel.learner import FittedModel, StepKind
from libs.perfmodel.wire import fitted_model, link_token_ns
from libs.policy.capacity import CapacityPlan
from libs.policy.newest import put_newest
from libs.policy.roles import MAX_BUDGET_TOKENS, Role
from libs.runtime.clock import Clock
from libs.telemetry.fleet_loads import COLUMNS, MOST_COUNTED, WINDOW_NS, columns_of, window_of
from libs.telemetry.lives import LifeSigns
from libs.telemetry.nodes import CPU_WAIT_UNITS

Ints = NDArray[np.int64]
Uints = NDArray[np.uint64]
Bools = NDArray[np.bool_]

ROLES: Final[frozenset[int]] = frozenset(Role)
# The time for which a worker keeps a role that a person set. Pinned workers keep it without a limit.
HAND_NS: Final = 60_000_000_000


MAX_TOKEN_BYTES: Final = 2**32
# The bounds above which values are invalid. Below them, sums over all workers fit into 64 bits.
MAX_BLOCK_TOKENS: Final = 2**16


class WorkerColumns:
    """Arrays with one element per worker, in the order of the registry."""

    def __init__(self, workers: Sequence[Worker], planner_id: str) -> None:
        self.workers = workers
        self.ids = [each.id for each in workers]
        self.index_of = {name: index for index, name in enumerate(self.ids)}
        self.incarnation: Uints = _uints(each.incarnation for each in workers)
        self.epoch: Uints = _uints(each.assignment.epoch for each in workers)
        self.role: Ints = _ints(each.assignment.role for each in workers)
        self.budget_tokens: Ints = _ints(each.assignment.budget_tokens for each in workers)
        self.gpus: Ints = _ints(gpus_of(each) for each in workers)
        self.ready: Bools = _bools(each.state == WORKER_STATE_READY for each in workers)
        self.kv_blocks: Ints = _ints(each.capabilities.kv_blocks for each in workers)
        self.block_tokens: Ints = _ints(min(each.capabilities.block_size_tokens, MAX_BLOCK_TOKENS) for each in workers)
        self.kv_token_bytes: Ints = _ints(
            min(each.capabilities.kv_block_bytes // max(each.capabilities.block_size_tokens, 1), MAX_TOKEN_BYTES)
            for each in workers
        )
        self.chunk_tokens: Ints = _ints(each.capabilities.chunk_tokens for each in workers)
        self.max_sequences: Ints = _ints(each.capabilities.max_sequences for each in workers)
        self.alone: dict[str, Unpaired] = unpaired(workers)
        """The workers that get no work in any role, with the reason."""
        self.paired: Bools = _bools(name not in self.alone for name in self.ids)
        by_planners = [by_planner(each, planner_id) for each in workers]
        self.keeps_budget: Bools = ~_bools(by_planners)
        """True if a person set the budget or the worker was started with it; False if a planner set it."""
        self.own_budgets: dict[str, int] = {
            each.id: min(each.role_change.own_budget_tokens, MAX_BUDGET_TOKENS)
            for each, ours in zip(workers, by_planners, strict=True)
            if ours and each.role_change.own_budget_tokens
        }
        """The budget that each worker had before planners changed it, as the worker reports it."""
        self._hand_until_ns: Uints = _uints(
            0 if ours or not each.role_change.actor else min(each.role_change.unix_ns, 2**62) + HAND_NS
            for each, ours in zip(workers, by_planners, strict=True)
        )
        self.groups: dict[str, str] = {each.id: each.group for each in workers if each.group}
        """The data-parallel group of each rank, by worker id. Groups of two models may have the same name."""
        together: dict[tuple[str, str], list[str]] = {}
        for each in sorted(workers, key=lambda worker: worker.id):
            if each.group:
                together.setdefault((each.assignment.model, each.group), []).append(each.id)
        self.ranks: dict[str, list[str]] = {names[0]: names for names in together.values()}
        """The ids of all ranks in each group, by the id of its first rank."""
        self.counts: Bools = _bools(name not in self.groups or name in self.ranks for name in self.ids)
        """True for single workers and for the first rank of each group, so that a group is counted as one worker."""
        models: dict[str, list[int]] = {}
        for index, each in enumerate(workers):
            models.setdefault(each.assignment.model, []).append(index)
        self.models: dict[str, Ints] = {name: np.array(indices, np.int64) for name, indices in sorted(models.items())}
        """The positions of each model's workers in the arrays."""

    def __len__(self) -> int:
        return len(self.ids)

    def pinned(self, named: Iterable[str], now_ns: int) -> Bools:
        """Return a mask of the workers that keep their role: the named ones, and those that a person moved recently."""
        kept: Bools = self._hand_until_ns > np.uint64(max(now_ns, 0))
        for name in named:
            if (index := self.index_of.get(name)) is not None:
                kept[index] = True
        return kept


def by_planner(worker: Worker, planner_id: str) -> bool:
    """Return whether this planner, or one with a default name, set the worker's assignment."""
    actor = worker.role_change.actor
    return actor == planner_id or actor.startswith(PLANNERS)


def gpus_of(worker: Worker) -> int:
    """Return the worker's weight in GPUs. A CPU worker weighs as much as one GPU."""
    return max(worker.gpus, 1)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _uints(values: Iterable[int]) -> Uints:
    return np.array(list(values), np.uint64)


def _bools(values: Iterable[bool]) -> Bools:
    return np.array(list(values), np.bool_)


# The bound on remembered metrics services. The one that published longest ago is dropped first.
MAX_METRICS_SERVICES: Final = 16
# An older message is a leftover in the broker's log and does not describe the present.
OLD_NS: Final = 30_000_000_000
# The indices in the last axis of `times`.
COVERED, PREFILL, DECODE = range(3)


class MessageOutcome(StrEnum):
    COUNTED = "counted"
    MALFORMED = "malformed"
    OLD = "old"


@dataclass(slots=True)
class _MetricsService:
    """A metrics service and the positions of its workers in the roster."""

    ids: Sequence[str] = ()
    roster: WorkerColumns | None = None
    indices: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """The position in the roster of each of the service's workers, or -1 for an unregistered worker."""


class FleetView:
    """Telemetry as arrays of shape [workers] in the order of `roster`.

    Reports of a worker's earlier incarnations are ignored.
    """

    def __init__(self, window_ns: int, lag_ns: int) -> None:
        self.roster = WorkerColumns((), "")
        self.loads: Uints = np.zeros((len(COLUMNS), 0), np.uint64)
        """The latest report of each worker: [columns, workers] uint64, with the columns in the order of `COLUMNS`."""
        self._columns: dict[str, Ints] = {}
        """Signed copies of the columns that have been read since the last message, by name."""
        self.received_ns: Ints = np.zeros(0, np.int64)
        """[workers] The local time of the latest new report in ns; 0 if this incarnation has not reported."""
        self.step_times: list[FittedModel | None] = []
        self.seen_steps: Ints = np.zeros((len(StepKind), 0), np.int64)
        """[kinds, workers] The number of steps behind the fitted step time, plus one; 0 if the worker reported none."""
        self.kv_token_ns: NDArray[np.float64] = np.zeros(0)
        """[workers] The time in which a worker receives the KV of one token, in ns; 0 if unknown."""
        self.revision = 0
        """A counter of changes to step times."""
        self._step_bytes: list[bytes] = []
        # Rounded down to whole windows, but not below one.
        self.window_ns = max(window_ns // WINDOW_NS, 1) * WINDOW_NS
        self.works = False
        """True if the last message reported running, waiting or finished work."""
        self._slots = (self.window_ns + lag_ns) // WINDOW_NS + 12
        self._times: NDArray[np.int32] = np.zeros((self._slots, 0, 3), np.int32)
        """[windows, workers, 3] int32 ns. A ring buffer indexed by the window's number."""
        self._numbers: Ints = np.full(self._slots, -1, np.int64)
        self._services: OrderedDict[str, _MetricsService] = OrderedDict()
        self.taken = Counter(dict.fromkeys(MessageOutcome, 0))
        self.latest_arrival_ns: int | None = None

    def take_roster(self, roster: WorkerColumns) -> None:
        """Replace the roster. The telemetry of workers in the same incarnation is kept."""
        before, self.roster = self.roster, roster
        olds = np.array([before.index_of.get(name, -1) for name in roster.ids], np.int64)
        stays = olds >= 0
        stays[stays] = before.incarnation[olds[stays]] == roster.incarnation[stays]
        count, olds = len(roster), olds[stays]
        loads, received = np.zeros((len(COLUMNS), count), np.uint64), np.zeros(count, np.int64)
        loads[:, stays], received[stays] = self.loads[:, olds], self.received_ns[olds]
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
        self.loads, self.received_ns, self._times, self.step_times, self._step_bytes = (
            loads,
            received,
            times,
            models,
            raw,
        )
        self.seen_steps = seen
        self._columns.clear()
        self.revision += 1

    @property
    def waiting_prefill_tokens(self) -> int:
        """The number of prompt tokens that wait at all workers."""
        return int(self.column("waiting_prefill_tokens").sum())

    def take(self, message: FleetLoads, now_ns: int) -> MessageOutcome:
        """Record a message that was received at `now_ns`, and return its outcome."""
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
        indices = self._indices(message.metrics_id, ids)
        there = indices >= 0
        there[there] = loads[COLUMNS.index("incarnations")][there] == self.roster.incarnation[indices[there]]
        at = indices[there]
        covered = COLUMNS.index("covered_to_unix_ns")
        newer = (loads[covered][there] > self.loads[covered][at]) | (self.received_ns[at] == 0)
        busy = any((times[:, PREFILL:] > 0).any() for _, _, times in windows)
        self.works = busy or bool(loads[COLUMNS.index("running") : COLUMNS.index("free_kv_blocks")].any())
        self.loads[:, at[newer]] = loads[:, there][:, newer]
        self._columns.clear()
        self.received_ns[at[newer]] = now_ns
        for start_ns, of, times in windows:
            self._take_window(start_ns, indices[of], there[of], times, now_ns)
        for each in message.step_times:
            if each.worker < len(ids) and there[each.worker]:
                self._take_step_time(int(indices[each.worker]), each.step_time)
        return MessageOutcome.COUNTED

    def role_now(self) -> tuple[Ints, Ints, Uints]:
        """Return the role, budget and epoch of each worker. Telemetry shows a change before the registry does."""
        roster = self.roster
        epoch = self.loads[COLUMNS.index("epochs")]
        newer = epoch > roster.epoch
        role = np.where(newer, self.column("roles"), roster.role)
        budget = np.where(newer, self.column("budget_tokens"), roster.budget_tokens)
        return role, budget, np.where(newer, epoch, roster.epoch)

    def epoch(self, index: int) -> int:
        """Return the latest known epoch of a worker's assignment."""
        return max(int(self.loads[COLUMNS.index("epochs"), index]), int(self.roster.epoch[index]))

    def column(self, name: str) -> Ints:
        """Return a column of shape [workers]. Its values are small enough for their sum to fit into 64 bits."""
        if name not in self._columns:
            self._columns[name] = self.loads[COLUMNS.index(name)].astype(np.int64)
        return self._columns[name]

    def is_known(self) -> Bools:
        """Return a mask of the workers whose present incarnation has reported."""
        return self.received_ns > 0

    def load(self, index: int) -> Load | None:
        """Return the load that a worker reported last, or None if it has not reported."""
        if not self.received_ns[index]:
            return None
        words = {name: int(self.loads[COLUMNS.index(name), index]) for name in LOAD_COLUMNS}
        return Load(**words)

    def cpu_wait(self, index: int) -> float | None:
        """Return the share of time in which a worker waits for a CPU, or None if it does not report this."""
        waits = int(self.loads[COLUMNS.index("cpu_waits"), index])
        return min((waits - 1) / CPU_WAIT_UNITS, 1.0) if waits else None

    def times_ns(self, end_ns: int) -> Ints:
        """Return the covered, prefill and decode time of each worker in ns, of shape [workers, 3].

        The times are sums over the complete windows in the `window_ns` before `end_ns`.
        """
        last = end_ns // WINDOW_NS
        first = last - self.window_ns // WINDOW_NS
        wanted = (self._numbers >= first) & (self._numbers < last)
        found: Ints = self._times[wanted].sum(axis=0, dtype=np.int64)
        return found

    def _indices(self, metrics_id: str, ids: Sequence[str]) -> Ints:
        service = self._services.get(metrics_id) or _MetricsService()
        put_newest(self._services, metrics_id, service, MAX_METRICS_SERVICES)
        if service.roster is not self.roster or service.ids != ids:
            known = self.roster.index_of
            service.ids, service.roster = ids, self.roster
            service.indices = np.array([known.get(name, -1) for name in ids], np.int64)
        return service.indices

    def _take_window(self, start_ns: int, indices: Ints, there: Bools, times: NDArray[np.int32], now_ns: int) -> None:
        number = start_ns // WINDOW_NS
        if number < now_ns // WINDOW_NS - self._slots or number > now_ns // WINDOW_NS + self._slots:
            return
        slot = number % self._slots
        if self._numbers[slot] > number:
            return
        if self._numbers[slot] < number:
            self._numbers[slot] = number
            self._times[slot] = 0
        at, new = indices[there], times[there]
        fuller = new[:, COVERED] >= self._times[slot, at, COVERED]
        self._times[slot, at[fuller]] = new[fuller]

    def _take_step_time(self, index: int, message: StepTime) -> None:
        raw = message.SerializeToString()
        if raw != self._step_bytes[index]:
            fitted = fitted_model(message)
            self._step_bytes[index], self.step_times[index] = raw, fitted
            self.kv_token_ns[index] = link_token_ns(message)
            for number, kind in enumerate(StepKind):
                steps = getattr(fitted, kind.value).steps if fitted is not None else -1
                self.seen_steps[number, index] = min(steps, MOST_COUNTED) + 1
            self.revision += 1


LOAD_COLUMNS: Final = (
    "running", "waiting", "waiting_prefill_tokens", "awaiting_kv", "free_kv_blocks", "preemptions",
    "recomputed_tokens", "pool_faults", "images_used", "image_encode_ns", "waiting_encode_ns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A registered worker and its load, which is None until its present incarnation reports."""

    worker: Worker
    load: Load | None
    coverage: float
    """The share of the window that the worker's telemetry covers, from 0 to 1."""
    cpu_wait: float | None = None
    """The share of time in which the worker waits for a CPU; None if it does not report this."""


# The states in which a worker's engine reports. A pool worker that loads a model, or has none, has no engine.
REPORTING: Final = frozenset((WORKER_STATE_READY, WORKER_STATE_DRAINING))


def observed_workers(view: FleetView, end_ns: int) -> list[ObservedWorker]:
    """Return all registered workers, with their telemetry in the window that ends at `end_ns`."""
    covered_ns = view.times_ns(end_ns)[:, COVERED].tolist()
    return [
        ObservedWorker(worker, view.load(index), covered_ns[index] / view.window_ns, view.cpu_wait(index))
        for index, worker in enumerate(view.roster.workers)
    ]


def life_signs(view: FleetView) -> dict[str, LifeSigns]:
    """Return the signs of life of all registered workers. Times are those of arrival at this planner."""
    received_ns = view.received_ns.tolist()
    return {
        worker.id: LifeSigns(worker.incarnation, received_ns[index] if reports else 0, ready=reports)
        for index, worker in enumerate(view.roster.workers)
        for reports in (worker.state in REPORTING,)
    }


# The bound on stored plans. The plan that was received longest ago is dropped first.
MAX_MODELS: Final = 64
# The age above which a plan is ignored, and the time by which it may lie in the future. Metrics services make a plan
# every five minutes.
FRESH_NS: Final = 3_600_000_000_000


class ReceivedPlans:
    """The latest capacity plan of each model, as long as it is fresh.

    Implements `libs.policy.capacity.CapacityPlans`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans: OrderedDict[str, tuple[int, CapacityPlan]] = OrderedDict()
        """The time and content of each model's latest plan."""
        self.taken = Counter(dict.fromkeys(MessageOutcome, 0))

    def take(self, message: PlanMessage) -> MessageOutcome:
        """Store a plan, unless a later one for the same model is known."""
        taken = self._take(message)
        self.taken[taken] += 1
        return taken

    def _take(self, message: PlanMessage) -> MessageOutcome:
        known = self._plans.get(message.model)
        if not self._fresh(message.made_unix_ns) or (known is not None and known[0] > message.made_unix_ns):
            return MessageOutcome.OLD
        if known is None or known[0] != message.made_unix_ns:  # plans are sent repeatedly
            try:
                known = message.made_unix_ns, plan_of(message)
            except ValueError:
                return MessageOutcome.MALFORMED
        put_newest(self._plans, message.model, known, MAX_MODELS)
        return MessageOutcome.COUNTED

    def plan(self, model: str) -> CapacityPlan | None:
        """Return a model's plan with times in Unix seconds, or None if there is no fresh one."""
        known = self._plans.get(model)
        return known[1] if known is not None and self._fresh(known[0]) else None

    def _fresh(self, made_unix_ns: int) -> bool:
        return abs(self._clock.now_ns() - made_unix_ns) <= FRESH_NS
