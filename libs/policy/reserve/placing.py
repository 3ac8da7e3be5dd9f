"""The model that each worker of a pool holds next: what to load, keep, put to sleep or evict.

The worker that changes its model is the one with the lowest cost: the seconds of the switch, plus the likely cold start
of the model that loses the worker. Waiting requests come first, then floors and reservations, then models under
pressure, then those worth loading ahead. A worker with work in flight loses its model only after its turn. The turn
lasts several times as long as the switch, so that switching takes a bounded share of its time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.policy.reserve.pool import Eviction, PlacedModel, PlacementOrder, PoolDecision, PoolWorker, Why, WorkerStage

SETTLE_S: Final = 1.0
"""The time a worker keeps a newly assigned model, whose first requests are still to arrive."""
PAY_BACK: Final = 4.0
"""The minimum length of a turn as a multiple of the switch to it."""
AHEAD_GAIN: Final = 1.5
"""The multiple of its cost that loading ahead of requests must save."""
BESIDE_S: Final = 0.5
"""The cost of a busy neighbour on the same GPU, whose steps alternate with the worker's."""
LINES_WAIT_S: Final = 600.0
"""The wait after which batch lines may take a worker from interactive requests, by which they would otherwise be
starved.
"""
NEVER_S: Final = 86_400.0
"""A wait that never ends."""
DRAIN_S: Final = 2.0
"""The assumed time until a switched worker's running answers have ended."""


@dataclass(frozen=True, slots=True)
class _WorkerNeed:
    model: PlacedModel
    why: Why


def place(
    models: Sequence[PlacedModel],
    workers: Sequence[PoolWorker],
    *,
    turn_s: float = 10.0,
    sleeps: bool = True,
    runs_s: float = NEVER_S,
) -> PoolDecision:
    """Decide the orders to workers, the expected waits and the next evictions.

    - turn_s: the minimum time a busy worker keeps its model while requests for others wait
    - sleeps: put models to sleep that are not worth the GPU time they hold
    - runs_s: the mean duration of requests, by which workers may become free early; it affects only the waits
    """
    pool = _PlacementRound(models, workers, turn_s, runs_s)
    orders = [
        PlacementOrder(each.id, "", Why.GONE, each.model)
        for each in workers
        if each.can_take and each.stage is WorkerStage.SERVING and each.model not in pool.known
    ]
    gone = {order.worker for order in orders}
    left = {each.id: each for each in workers if each.can_take and each.id not in gone}
    for need in _needs(models, pool.held):
        order = pool.best(need, left.values())
        if order is not None:
            orders.append(order)
            pool.assign(need, left.pop(order.worker))
    waits = pool.waits(orders)
    if sleeps:
        idle = [each for each in left.values() if pool.is_not_worth(each)]
        orders += [PlacementOrder(each.id, "", Why.NOT_WORTH, each.model) for each in idle]
    return PoolDecision(orders, waits, pool.evictions())


def switch_s(model: PlacedModel, worker: PoolWorker) -> float:
    """Return the time from the order until the worker serves the model, without waiting for answers that still run
    there.
    """
    return model.wake_s if model.name in worker.kept else model.load_s


def fits(model: PlacedModel, worker: PoolWorker) -> bool:
    """Return whether the model's weights fit into the worker's memory."""
    return not worker.memory_bytes or model.size_bytes <= worker.memory_bytes


def _needs(models: Sequence[PlacedModel], held: Counter[str]) -> Iterator[_WorkerNeed]:
    """Yield the models that need one more worker, most urgent first."""
    free = [each for each in models if not each.blocked]
    requested = [each for each in free if each.waiting and not held[each.name]]
    for each in sorted(requested, key=_urgency):
        yield _WorkerNeed(each, Why.REQUESTED)
    for each in sorted(free, key=lambda one: (-one.priority, one.name)):
        for _ in range(each.least - held[each.name]):
            yield _WorkerNeed(each, Why.KEPT)
    pressed = [each for each in free if each.waiting and 0 < held[each.name] < each.most]
    for each in sorted(pressed, key=lambda one: (-one.priority, -one.waited_s, one.name)):
        yield _WorkerNeed(each, Why.PRESSED)
    ahead = [each for each in free if not held[each.name] and not each.waiting and each.worth_ahead > 1]
    for each in sorted(ahead, key=lambda one: (-one.worth_ahead, one.name)):
        yield _WorkerNeed(each, Why.AHEAD)


def _urgency(one: PlacedModel) -> tuple[bool, bool, int, float, str]:
    # Interactive requests come before batch lines, whatever the priorities of their models, because lines have hours.
    return not one.people_wait, not one.least, -one.priority, -one.waited_s, one.name


class _PlacementRound:
    """The workers of the pool during the search for orders."""

    def __init__(
        self, models: Sequence[PlacedModel], workers: Sequence[PoolWorker], turn_s: float, runs_s: float
    ) -> None:
        self.known = {each.name: each for each in models}
        # By model, the number of workers that hold it or will.
        self.held = Counter(each.model for each in workers if each.stage in (WorkerStage.LOADING, WorkerStage.SERVING))
        self._workers = workers
        self._turn_least_s = turn_s
        self._runs_s = runs_s
        self._busy_on = Counter(each.gpu for each in workers if each.gpu and self._is_requested(each.model))

    def best(self, need: _WorkerNeed, workers: Iterable[PoolWorker]) -> PlacementOrder | None:
        """Return the order for the cheapest worker, or None if none may be taken."""
        found: list[tuple[float, int, str, PlacementOrder]] = []
        for worker in workers:
            loss_s = self._loss_s(need, worker) if fits(need.model, worker) else None
            if loss_s is None:
                continue
            took_s = switch_s(need.model, worker) + self._put_away_s(worker)
            loss_s += BESIDE_S * self._busy_beside(worker)
            evicts = worker.model if worker.stage is WorkerStage.SERVING else ""
            is_turn = bool(evicts) and self._is_needed(self.known[evicts])
            why = Why.TURN if is_turn else need.why
            order = PlacementOrder(worker.id, need.model.name, why, evicts, took_s)
            # Among equals, prefer the smallest; large ones are for models that fit nowhere else.
            found.append((took_s + loss_s, worker.memory_bytes, worker.id, order))
        return min(found, key=lambda each: each[:3])[3] if found else None

    def assign(self, need: _WorkerNeed, worker: PoolWorker) -> None:
        """Count the worker as the model's from now on."""
        self.held[need.model.name] += 1
        if worker.stage is WorkerStage.SERVING:
            self.held[worker.model] -= 1
        if worker.gpu:
            self._busy_on[worker.gpu] += need.model.is_busy - self._is_requested(worker.model)

    def _is_requested(self, name: str) -> bool:
        model = self.known.get(name)
        return model is not None and model.is_busy

    def _busy_beside(self, worker: PoolWorker) -> int:
        """Return the number of busy neighbours on the worker's GPU."""
        return self._busy_on[worker.gpu] - self._is_requested(worker.model) if worker.gpu else 0

    def _put_away_s(self, worker: PoolWorker) -> float:
        """Return the time to put the worker's present model away before another one can come."""
        held = self.known.get(worker.model)
        return held.sleep_s if held is not None and worker.stage is WorkerStage.SERVING else 0.0

    def _loss_s(self, need: _WorkerNeed, worker: PoolWorker) -> float | None:
        """Return the cost of giving the worker to the model, in addition to the switch; None if that is not allowed."""
        if worker.stage is WorkerStage.EMPTY:
            return 0.0
        model = self.known.get(worker.model)
        if worker.stage is not WorkerStage.SERVING or model is None or model.name == need.model.name:
            return None
        if worker.since_s < SETTLE_S or self.held[model.name] <= model.least:
            return None
        if self._is_needed(model):
            # Answers run there, so the worker is taken only for waiting requests and after its turn.
            is_over = self._free_of(model, need.model, worker.since_s)
            return DRAIN_S + model.load_s if need.why is Why.REQUESTED and is_over else None
        loss_s = model.soon * model.load_s
        if need.why is Why.AHEAD:
            settled = worker.since_s >= PAY_BACK * model.load_s
            saves_s = need.model.soon * need.model.load_s
            return loss_s if settled and saves_s > AHEAD_GAIN * loss_s else None
        return loss_s

    def _free_of(self, model: PlacedModel, wanted: PlacedModel, since_s: float) -> bool:
        """Return whether a busy worker may be taken for the requests that wait for `wanted`.

        It may be taken after its turn. Interactive requests take it from batch lines at once, and batch lines take
        it from interactive requests only after a long wait.
        """
        if model.runs_for_lines_alone and wanted.people_wait:
            return True
        if not wanted.people_wait and not model.runs_for_lines_alone and wanted.waited_s < LINES_WAIT_S:
            return False
        return since_s >= self._turn_s(model) and model.priority <= wanted.priority

    def _is_needed(self, model: PlacedModel) -> bool:
        """Return whether losing one worker would delay an answer of the model."""
        return model.is_busy and self.held[model.name] <= max(model.most, 1)

    def _is_kept(self, model: PlacedModel) -> bool:
        """Return whether no worker of the model may go to another one."""
        return model.least > 0 and self.held[model.name] <= model.least

    def _turn_s(self, model: PlacedModel) -> float:
        return max(self._turn_least_s, PAY_BACK * model.load_s)

    def is_not_worth(self, worker: PoolWorker) -> bool:
        """Return whether the worker holds an idle model that costs more than it saves."""
        model = self.known.get(worker.model)
        if model is None or worker.stage is not WorkerStage.SERVING or model.is_busy:
            return False
        settled = worker.since_s >= max(SETTLE_S, PAY_BACK * model.wake_s)
        return settled and model.worth <= 1 and self.held[model.name] > model.least

    def waits(self, orders: Sequence[PlacementOrder]) -> dict[str, float]:
        """Return the expected wait by model.

        Models without a worker get workers as these become free, in the order of their waits.
        """
        waits: dict[str, float] = {}
        ordered = {order.worker: order for order in orders}
        for worker in self._workers:
            if worker.stage in (WorkerStage.SERVING, WorkerStage.LOADING) and worker.id not in ordered:
                left_s = worker.left_s if worker.stage is WorkerStage.LOADING else 0.0
                waits[worker.model] = min(waits.get(worker.model, left_s), left_s)
        for order in orders:
            if order.model:
                took_s = order.switch_s + (DRAIN_S if order.why is Why.TURN else 0.0)
                waits[order.model] = min(waits.get(order.model, took_s), took_s)
        every = self._free(ordered)
        line = sorted(
            (each for each in self.known.values() if each.name not in waits),
            key=lambda one: (not one.waiting, not one.people_wait, -one.priority, -one.waited_s, one.name),
        )
        before = 0
        for model in line:
            free = [each for each in every if fits(model, each[2])]
            if not free:
                # A pool without workers may get one back at any moment, so requests wait as long as allowed.
                waits[model.name] = NEVER_S if self._workers else model.load_s
                continue
            # Models that are only likely to be requested queue behind those with waiting requests.
            free_in_s, _, worker = free[before % len(free)]
            rounds = before // len(free)
            took_s = switch_s(model, worker) + self._put_away_s(worker)
            waits[model.name] = free_in_s + took_s + rounds * (self._turn_s(model) + model.load_s)
            before += model.waiting > 0
        return waits

    def _free(self, ordered: Mapping[str, PlacementOrder]) -> list[tuple[float, str, PoolWorker]]:
        """Return when each worker is expected to become free, earliest first. Workers that never do are left out."""
        times = (
            (self._free_after_s(ordered[each.id]) if each.id in ordered else self._free_in_s(each), each.id, each)
            for each in self._workers
        )
        found = sorted(times, key=lambda each: each[:2])
        serving = {each.id for each in self._workers if each.stage is WorkerStage.SERVING} - ordered.keys()
        busy = [each for each in found if each[1] in serving and SETTLE_S < each[0] < NEVER_S]
        free = [each for each in found if each not in busy and each[0] < NEVER_S]
        # Memoryless runs: of n in progress, the next one ends after 1/n of their mean.
        ends_s = 0.0
        for number, (turn_s, name, worker) in enumerate(busy):
            ends_s += self._runs_s / (len(busy) - number)
            free.append((min(turn_s, ends_s), name, worker))
        return sorted(free, key=lambda each: each[:2])

    def _free_after_s(self, order: PlacementOrder) -> float:
        """Return the time until a worker given to a model now may be given to the next one."""
        model = self.known.get(order.model)
        if model is None:
            return DRAIN_S
        if self._is_kept(model):
            return NEVER_S
        return order.switch_s + self._turn_s(model) + DRAIN_S

    def _free_in_s(self, worker: PoolWorker) -> float:
        """Return the time until the worker may be given to a model with waiting requests."""
        if worker.stage is WorkerStage.EMPTY:
            return 0.0
        model = self.known.get(worker.model)
        if model is None:
            return worker.left_s
        if self._is_kept(model):
            return NEVER_S
        if worker.stage is WorkerStage.LOADING:
            return worker.left_s + (self._turn_s(model) + DRAIN_S if model.is_busy else SETTLE_S)
        if worker.stage is WorkerStage.LEAVING:
            return DRAIN_S + model.load_s + self._turn_s(model)
        if self._is_needed(model):
            return max(self._turn_s(model) - worker.since_s, 0.0) + DRAIN_S
        return max(SETTLE_S - worker.since_s, 0.0)

    def evictions(self) -> list[Eviction]:
        """Return the workers that may lose their model, the next one first."""
        found = []
        for worker in self._workers:
            model = self.known.get(worker.model)
            if worker.stage is WorkerStage.SERVING and model is not None:
                free_in_s = self._free_in_s(worker)
                if free_in_s < NEVER_S:
                    found.append(Eviction(worker.id, model.name, model.soon * model.load_s, free_in_s))
        return sorted(found, key=lambda each: (each.free_in_s, each.loss_s, each.worker))
