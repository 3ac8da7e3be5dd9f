"""The placement of a catalogue's models on a pool of workers: the state of both, and the resulting orders. No I/O."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    WORKER_STATE_ASLEEP,
    WORKER_STATE_DRAINING,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    Worker,
)
from libs.policy.reserve.following import ModelCount, ModelPrediction, UseFollower
from libs.policy.reserve.placing import NEVER_S, place
from libs.policy.reserve.pool import (
    GpuClaim,
    PlacedModel,
    PlacementOrder,
    PoolDecision,
    PoolWorker,
    WorkerStage,
    kept_at,
)
from libs.stores.catalogue import DAY_MINUTES, Catalogued, LoadTimes, ModelEntry, ModelOutlook, ModelUse, Uses

SECOND_NS: Final = 1_000_000_000


def claims_of(entry: ModelEntry) -> list[GpuClaim]:
    """Return the reservations, floor and pin of one model as claims."""
    claims = [
        GpuClaim(entry.name, each.gpus, "reservation", each.from_minute, each.to_minute, entry.priority)
        for each in entry.reservations
    ]
    if entry.floor:
        claims.append(GpuClaim(entry.name, entry.floor, "floor", priority=entry.priority))
    if entry.pinned:
        claims.append(GpuClaim(entry.name, 1, "pin", priority=entry.priority))
    return claims


def minute_of(unix_ns: int) -> int:
    """Return the minute of the day in UTC."""
    return unix_ns // (60 * SECOND_NS) % DAY_MINUTES


def gpu_of(worker: Worker) -> str:
    """Return a name for the GPU that a worker shares with others, or an empty string if it does not share one."""
    return f"{worker.node}/{','.join(worker.gpu_uuids)}" if 0 < worker.gpu_share < 1 and worker.gpu_uuids else ""


def devices(workers: Sequence[Worker]) -> int:
    """Return the number of GPUs that these workers use. A shared GPU is counted once."""
    names = [gpu_of(worker) for worker in workers]
    return len(set(names) - {""}) + names.count("")


# The bound on remembered counts of silent gateways.
MAX_SEEN: Final = 100_000


class UseCounts:
    """The number of requests to each model since the planner started, over all gateways.

    A gateway that restarts counts from 0 again.
    """

    def __init__(self) -> None:
        self._uses: Uses = {}
        self._arrivals: dict[str, int] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._last_ms: dict[str, int] = {}

    def take(self, uses: Uses) -> None:
        """Record the current counts of all gateways."""
        self._uses = uses
        seen: dict[tuple[str, str], int] = {}
        for gateway, models in uses.items():
            for name, use in models.items():
                last = self._seen.get((gateway, name), 0)
                new = use.arrivals - last if use.arrivals >= last else use.arrivals
                self._arrivals[name] = self._arrivals.get(name, 0) + new
                self._last_ms[name] = max(self._last_ms.get(name, 0), use.last_unix_ms)
                seen[gateway, name] = use.arrivals
        # The counts of a gateway that was briefly silent are kept, so that they continue.
        self._seen = seen if len(self._seen) > MAX_SEEN else {**self._seen, **seen}

    def in_flight(self, name: str) -> int:
        """Return the number of requests to a model that have not ended."""
        return sum(use.in_flight for use in self.of(name))

    def waiting(self, name: str) -> int:
        """Return the number of requests to a model that wait for a worker."""
        return sum(use.waiting for use in self.of(name))

    def last_use_ms(self, name: str) -> int:
        """Return the arrival time of the last request in Unix ms, or 0 if there was none since the planner started."""
        return self._last_ms.get(name, 0)

    def count(self, name: str) -> ModelCount:
        return ModelCount(self._arrivals.get(name, 0), self.in_flight(name), self.last_use_ms(name) / 1000)

    def of(self, name: str) -> Iterator[ModelUse]:
        """Yield the counts of a model at each gateway."""
        for models in self._uses.values():
            if name in models:
                yield models[name]


MS_NS: Final = 1_000_000
# The loading speed assumed until a model has been loaded, if the pool states none.
GUESSED_BYTES_PER_S: Final = 1e9
# The time between the end of loading and the connections of gateways, measured on a busy machine.
CONNECT_S: Final = 0.15
# The time after which a worker that does not show the effect of an order is treated as not reached.
SHOWN_S: Final = 5.0
# The bounds of the retry delay of a model that failed to load. The delay doubles with every failure.
FIRST_BLOCK_S, MOST_BLOCK_S = 2.0, 120.0
# A measured load time is stored only if it differs from the stored one by more than this share.
MEASURED_SHARE: Final = 0.05
# The interval between predictions of which models are used next.
CHANCES_NS: Final = SECOND_NS
# The GPUs of a reservation are prepared before it begins: by the load time plus this time.
PREPARE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Knobs:
    turn_s: float = 10.0
    cold_cost_gpu_s: float = 300.0
    """The assumed cost of one cold start in GPU-seconds."""
    sleeps: bool = True
    window_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """An order to a worker of the pool, with the model's entry."""

    worker: Worker
    epoch: int
    order: PlacementOrder
    entry: ModelEntry | None
    """The entry of the model to load; None to unload."""


@dataclass(slots=True)
class _PendingOrder:
    """An order that was sent to a worker, kept until the worker shows its effect."""

    model: str
    epoch: int
    at_ns: int
    ready_ns: int


@dataclass(slots=True)
class _Failure:
    message: str
    unix_ns: int
    times: int
    until_ns: int


@dataclass(slots=True)
class ModelKeeper:
    """The state of the catalogue and the pool. Callers pass the time."""

    knobs: Knobs
    found: Catalogued = field(default_factory=Catalogued)
    workers: Sequence[Worker] = ()
    """The registered workers that belong to the pool."""
    placed: PoolDecision = field(default_factory=lambda: PoolDecision((), {}, ()))
    models: Mapping[str, PlacedModel] = field(default_factory=dict)
    """The models at the last decision."""
    switches: Counter[str] = field(default_factory=Counter)
    cold_starts: int = 0
    """The number of models loaded for a waiting request."""
    switched_s: float = 0.0
    """The time that workers have spent on loading models, in s."""
    uses: UseCounts = field(default_factory=UseCounts)
    """The use of each model, as counted by gateways."""
    _ordered: dict[str, _PendingOrder] = field(default_factory=dict)
    _failures: dict[str, _Failure] = field(default_factory=dict)
    _moves: dict[str, int] = field(default_factory=dict)
    """The time of the last change of model that has been processed, by worker."""
    follower: UseFollower = field(init=False)
    """The statistics of use by model.

    A request to an adapter counts for its base model, because both need the same GPUs.
    """
    adapter_follower: UseFollower = field(init=False)
    chances: Mapping[str, ModelPrediction] = field(default_factory=dict)
    adapter_chances: Mapping[str, ModelPrediction] = field(default_factory=dict)
    adapters: Mapping[str, ModelEntry] = field(init=False)
    _models: Mapping[str, ModelEntry] = field(init=False)
    """The catalogue's entries without adapters, by name."""
    _chances_ns: int = 0

    def __post_init__(self) -> None:
        self.follower = UseFollower(window_s=self.knobs.window_s)
        self.adapter_follower = UseFollower(window_s=self.knobs.window_s)
        self._sort()

    # ------------------------------------------------------------ inputs

    def take_workers(self, workers: Sequence[Worker], now_ns: int) -> dict[str, LoadTimes]:
        """Replace the list of workers.

        Return, by model, the newly measured load times that differ from the stored ones.
        """
        self.workers = [each for each in workers if each.HasField("pool")]
        measured: dict[str, LoadTimes] = {}
        for worker in self.workers:
            reported = self._ordered.get(worker.id)
            if reported is not None and worker.assignment.epoch >= reported.epoch:
                del self._ordered[worker.id]
            move = worker.pool.last
            if not move.unix_ns or self._moves.get(worker.id) == move.unix_ns:
                continue
            self._moves[worker.id] = move.unix_ns
            if move.error:
                self._take_failure(move.model, move.error, now_ns)
                continue
            self._failures.pop(move.model, None)
            self.switched_s += move.took_ns / 1e9
            times = self._timed(move.model, move.took_ns / 1e9, from_host=move.from_host)
            if times is not None:
                measured[move.model] = times
        listed = {worker.id for worker in self.workers}
        for gone in self._moves.keys() - listed:
            del self._moves[gone]
        return measured

    def _timed(self, name: str, took_s: float, *, from_host: bool) -> LoadTimes | None:
        before = self.found.times.get(name, LoadTimes())
        kept_s = before.wake_s if from_host else before.load_s
        if name not in self.found.entries or abs(took_s - kept_s) <= MEASURED_SHARE * took_s:
            return None
        after = LoadTimes(before.load_s, took_s) if from_host else LoadTimes(took_s, before.wake_s)
        self.found = Catalogued(self.found.entries, {**self.found.times, name: after}, self.found.outlooks)
        return after

    def _take_failure(self, name: str, message: str, now_ns: int) -> None:
        before = self._failures.get(name)
        times = before.times + 1 if before else 1
        block_s = min(FIRST_BLOCK_S * 2 ** (times - 1), MOST_BLOCK_S)
        self._failures[name] = _Failure(message, now_ns, times, now_ns + round(block_s * SECOND_NS))

    def take_catalogue(self, found: Catalogued) -> None:
        """Replace the catalogue. A changed entry may be loaded again at once, even if it failed before."""
        for name, entry in found.entries.items():
            if self.found.entries.get(name) != entry:
                self._failures.pop(name, None)  # the entry has changed, so the model may load now
        for gone in self._failures.keys() - found.entries.keys():
            del self._failures[gone]
        self.found = found
        self._sort()

    def _sort(self) -> None:
        entries = self.found.entries.items()
        self.adapters = {name: entry for name, entry in entries if entry.parent}
        self._models = {name: entry for name, entry in entries if not entry.parent}

    def forget(self, name: str) -> None:
        """Forget a model that was removed from the catalogue."""
        entries = {each: entry for each, entry in self.found.entries.items() if each != name}
        self.take_catalogue(Catalogued(entries, self.found.times, self.found.outlooks))

    def take_uses(self, uses: Uses, now_ns: int) -> bool:
        """Record the counts of gateways. Return whether requests now wait for a model for which none waited before."""
        before = {name for name in self.found.entries if self.uses.waiting(name)}
        self.uses.take(uses)
        self.look(now_ns)
        return any(self.uses.waiting(name) and name not in before for name in self.found.entries)

    def look(self, now_ns: int) -> None:
        """Update the statistics of use of models and adapters."""
        self.follower.look(now_ns / 1e9, {name: self.uses.count(name) for name in self._models})
        if self.adapters:
            self.adapter_follower.look(now_ns / 1e9, {name: self.uses.count(name) for name in self.adapters})

    # ------------------------------------------------------------ queries

    def alone(self, name: str) -> tuple[int, int]:
        """Return the requests in flight and the waiting requests of an adapter, or of a model without its adapters."""
        beside = sum(self.uses.in_flight(each.name) for each in self.adapters.values() if each.parent == name)
        return max(self.uses.in_flight(name) - beside, 0), self.uses.waiting(name)

    def failure(self, name: str, now_ns: int) -> str:
        """Return the reason why a model cannot be loaded now, or an empty string if it can be."""
        entry = self.found.entries.get(name)
        if entry is not None and entry.parent:
            return self.failure(entry.parent, now_ns)
        most = max((each.pool.memory_bytes for each in self.workers), default=0)
        if entry is not None and 0 < most < entry.size_bytes:
            return (
                f"it has {entry.size_bytes / 1e9:.1f} GB of weights, no worker more than {most / 1e9:.1f} GB of memory"
            )
        failure = self._failures.get(name)
        return failure.message if failure is not None and now_ns < failure.until_ns else ""

    def claims(self) -> list[GpuClaim]:
        """Return all claims of all models, at whatever time of day."""
        return [claim for entry in self.found.entries.values() for claim in claims_of(entry)]

    @property
    def gpus(self) -> int:
        """The number of workers in the pool, each of which serves one model."""
        return len(self.workers)

    def load_s(self, entry: ModelEntry) -> float:
        """Return the time to load a model from its source, measured if possible, otherwise estimated."""
        times = self.found.times.get(entry.name)
        return (times.load_s if times else 0.0) or self._stated(entry, wakes=False)

    def wake_s(self, entry: ModelEntry) -> float:
        """Return the time to load a model from host memory, measured if possible, otherwise estimated."""
        times = self.found.times.get(entry.name)
        return (times.wake_s if times else 0.0) or min(self._stated(entry, wakes=True), self.load_s(entry))

    def _sleep_s(self, entry: ModelEntry) -> float:
        # Moving a model to host memory is assumed to take as long as loading it from there.
        per_s = self.workers[0].pool.wake_bytes_per_s if self.workers else 0.0
        return entry.size_bytes / per_s if per_s else self.wake_s(entry)

    def _stated(self, entry: ModelEntry, *, wakes: bool) -> float:
        pool = self.workers[0].pool if self.workers else None
        per_s = (pool.wake_bytes_per_s if wakes else pool.load_bytes_per_s) if pool else 0.0
        return entry.size_bytes / (per_s or GUESSED_BYTES_PER_S) + (pool.overhead_s if pool else 0.0)

    # ------------------------------------------------------------ decisions

    def decide(self, now_ns: int) -> list[Call]:
        """Return the orders to send now. A worker is assumed to follow an order until it shows otherwise."""
        self.look(now_ns)
        entries = self._models
        loads = {name: self.load_s(entry) for name, entry in entries.items()}
        horizon_s = max(self.knobs.turn_s, 4 * max(loads.values(), default=1.0))
        if now_ns - self._chances_ns >= CHANCES_NS or loads.keys() != self.chances.keys():
            self._chances_ns = now_ns
            times = {"horizon_s": horizon_s, "cold_cost_gpu_s": self.knobs.cold_cost_gpu_s}
            self.chances = self.follower.chances(now_ns / 1e9, load_s=loads, **times)
            adapters = dict.fromkeys(self.adapters, 0.0)
            self.adapter_chances = self.adapter_follower.chances(now_ns / 1e9, load_s=adapters, **times)
        standings = [self._standing(worker, now_ns) for worker in self.workers]
        models = [self._model(entry, standings, now_ns) for entry in entries.values()]
        self.models = {each.name: each for each in models}
        self.placed = place(
            models,
            standings,
            turn_s=self.knobs.turn_s,
            sleeps=self.knobs.sleeps,
            runs_s=self.follower.runs_s or NEVER_S,
        )
        by_id = {worker.id: worker for worker in self.workers}
        return [self._call(by_id[order.worker], order, now_ns) for order in self.placed.orders]

    def done(self, call: Call, *, reached: bool) -> None:
        """Record the end of a call. A worker that was not reached is available to the next decision."""
        reported = self._ordered.get(call.worker.id)
        if not reached and reported is not None and reported.epoch == call.epoch + 1:
            del self._ordered[call.worker.id]

    def _call(self, worker: Worker, order: PlacementOrder, now_ns: int) -> Call:
        self.switches[order.why.value] += 1
        model = self.models.get(order.model)
        self.cold_starts += bool(model and model.waiting)
        epoch = worker.assignment.epoch
        ready_ns = now_ns + round((order.switch_s + CONNECT_S) * SECOND_NS)
        self._ordered[worker.id] = _PendingOrder(order.model, epoch + 1, now_ns, ready_ns)
        return Call(worker, epoch, order, self.found.entries.get(order.model) if order.model else None)

    def _standing(self, worker: Worker, now_ns: int) -> PoolWorker:
        model, stage, can_take, left_s = worker.assignment.model, WorkerStage.LEAVING, False, 0.0
        since_s = max(now_ns - worker.pool.since_unix_ns, 0) / 1e9
        reported = self._ordered.get(worker.id)
        is_draining = worker.state == WORKER_STATE_DRAINING
        if reported is not None and now_ns - reported.at_ns > SHOWN_S * SECOND_NS and not is_draining:
            del self._ordered[worker.id]
            reported = None
        if reported is not None:
            model, since_s = reported.model, 0.0
            stage = WorkerStage.LOADING if model else WorkerStage.LEAVING
            left_s = max(reported.ready_ns - now_ns, 0) / 1e9
        elif worker.state == WORKER_STATE_READY:
            stage, can_take = WorkerStage.SERVING, True
        elif worker.state == WORKER_STATE_ASLEEP:
            model, stage, can_take = "", WorkerStage.EMPTY, True
        elif worker.state == WORKER_STATE_LOADING and model:
            stage, left_s = WorkerStage.LOADING, max(self._ready_ns(worker) - now_ns, 0) / 1e9
        return PoolWorker(
            worker.id,
            stage,
            model,
            since_s,
            left_s,
            kept=frozenset(each.model for each in worker.pool.asleep),
            can_take=can_take,
            gpu=gpu_of(worker),
            memory_bytes=worker.pool.memory_bytes,
        )

    def _ready_ns(self, worker: Worker) -> int:
        """Return the time at which a loading worker is expected to serve.

        It is the later of two estimates: the measured load time, and the worker's own.
        """
        name, pool = worker.assignment.model, worker.pool
        times = self.found.times.get(name)
        sleeps = any(each.model == name for each in pool.asleep)
        measured_s = (times.wake_s if sleeps else times.load_s) if times else 0.0
        return int(pool.since_unix_ns + max(round(measured_s * SECOND_NS), pool.expected_ns) + CONNECT_S * SECOND_NS)

    def _model(self, entry: ModelEntry, standings: Sequence[PoolWorker], now_ns: int) -> PlacedModel:
        name, chances = entry.name, self.chances[entry.name]
        now_ms = now_ns // MS_NS
        uses = list(self.uses.of(name))
        promised = any(use.promised_unix_ms > now_ms for use in uses)
        since_ms = min((use.waiting_since_unix_ms for use in uses if use.waiting), default=now_ms)
        held = sum(
            each.model == name and each.stage in (WorkerStage.SERVING, WorkerStage.LOADING) for each in standings
        )
        least = max(entry.floor, self._reserved(entry, now_ns), int(entry.pinned and held > 0))
        waiting = self.uses.waiting(name)
        return PlacedModel(
            name=name,
            load_s=self.load_s(entry),
            wake_s=self.wake_s(entry),
            sleep_s=self._sleep_s(entry),
            # A client that was refused with Retry-After is expected to return, so its worker must not switch to another
            # model.
            waiting=waiting or int(promised and not held),
            waited_s=max(now_ms - since_ms, 0) / 1000,
            in_flight=self.uses.in_flight(name) or int(promised),
            priority=entry.priority,
            lines_waiting=sum(use.lines_waiting for use in uses),
            lines_in_flight=sum(use.lines_in_flight for use in uses),
            least=least,
            most=max(least, 1),
            soon=chances.soon,
            worth=chances.worth,
            worth_ahead=chances.worth_ahead,
            blocked=bool(self.failure(name, now_ns)),
            size_bytes=entry.size_bytes,
        )

    def _reserved(self, entry: ModelEntry, now_ns: int) -> int:
        """Return the number of GPUs reserved for a model now, or at the end of a load that starts now."""
        claims = [claim for claim in claims_of(entry) if claim.kind == "reservation"]
        ahead_ns = round((self.load_s(entry) + PREPARE_S) * SECOND_NS)
        return max(kept_at(claims, minute_of(at_ns)).get(entry.name, 0) for at_ns in (now_ns, now_ns + ahead_ns))

    # ------------------------------------------------------------ reports

    def outlooks(self, now_ns: int) -> dict[str, ModelOutlook]:
        """Return the state of each model for gateways. It does not change as long as nothing happens."""
        found = {}
        for name in self.found.entries:
            state, ready_ms = self.stands(name, now_ns)
            wait_s = self.expected_wait_s(name)
            error = self.failure(name, now_ns)
            found[name] = ModelOutlook("failed" if error else state, wait_s, ready_ms, error)
        return found

    def expected_wait_s(self, name: str) -> float:
        """Return the expected wait of a request that arrives now, in s; 0 if a worker serves the model."""
        entry = self.found.entries.get(name)
        wait_s = self.placed.waits_s.get((entry.parent if entry else "") or name, 0.0)
        return round(min(wait_s + CONNECT_S, NEVER_S), 1) if wait_s else 0.0

    def stands(self, name: str, now_ns: int) -> tuple[str, int]:
        """Return a model's state and, while it loads, the expected time in Unix ms at which it serves.

        An adapter has the state of its base model. If that model is outside the pool, its own workers serve the
        adapter.
        """
        entry = self.found.entries.get(name)
        if entry is not None and entry.parent:
            return self.stands(entry.parent, now_ns) if entry.parent in self.found.entries else ("serving", 0)
        ready_ms = []
        for worker in self.workers:
            reported = self._ordered.get(worker.id)
            if reported is not None:
                if reported.model == name:
                    ready_ms.append(reported.ready_ns // MS_NS)
            elif worker.assignment.model == name and worker.state == WORKER_STATE_READY:
                return "serving", 0
            elif worker.assignment.model == name and worker.state == WORKER_STATE_LOADING:
                ready_ms.append(self._ready_ns(worker) // MS_NS)
        if ready_ms:
            return "loading", min(ready_ms)
        in_host = any(name == each.model for worker in self.workers for each in worker.pool.asleep)
        return ("asleep" if in_host else "disk"), 0
