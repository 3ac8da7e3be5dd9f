"""The queue of choices for which no worker has room yet."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Final

from libs.contracts.errors import FulcrumError, NoWorkers, QueueFull
from libs.dispatch.generation import RETRY_AFTER_S, Generation
from libs.dispatch.places import TenantPlaces
from libs.dispatch.ports import ColdModels, Links, OneForAll, QueuedDemand, Tenancy
from libs.policy.gateway.binding import fastest_speed, least_encode_ns
from libs.policy.gateway.fairness import FairTurns, Flow
from libs.policy.gateway.order import Expiry, Line, WaitBounds, hopeless_from_ns
from libs.policy.gateway.places import queue_room
from libs.policy.gateway.queues import NEWCOMERS, Outflow, Promises, Queue, model_queues, retry_after_s
from libs.policy.gateway.view import (
    WorkerView,
    computes_prompts,
    prompt_rooms,
    prompts_may_start,
    rooms,
    serves,
    why_not,
)
from libs.policy.speed import Speed

# The waiting time up to which a choice is assumed to have been bound to free capacity. It is no measure of the rate at
# which workers free capacity.
AT_ONCE_NS = 50_000_000
# The bound on the models whose rate is remembered while no choices wait for them.
MOST_PACES: Final = 256


class WaitingQueue:
    """The queue of one gateway.

    Its bound applies to new choices only. A choice that lost its worker always returns to the queue.
    """

    def __init__(self, max_waiting: int, tenants: Tenancy | None = None) -> None:
        """Create the queue, which `tenants` share fairly. With None, all requests are treated alike."""
        self._max_waiting = max_waiting
        self._tenants = tenants or OneForAll()
        self._of_tenant: dict[str, Counter[str]] = {}
        """The number of waiting choices by model and tenant, without batch lines.

        Models and tenants with none are absent.
        """
        self._waiting: dict[int, Generation] = {}
        # Both are by model, and contain only models with waiting choices.
        self._lines: dict[str, Line[Generation]] = {}
        self._fair: dict[str, FairTurns] = {}
        self._turns: dict[int, tuple[Flow, int]] = {}
        """The flow and turn of waiting choices that take turns, by sequence id."""
        self._unjudged: list[Generation] = []
        self._tokens: Counter[str] = Counter()
        self._pooled: Counter[str] = Counter()
        """The number of waiting choices that need no decode worker, by model."""
        self._batch: Counter[str] = Counter()
        self._batch_tokens: Counter[str] = Counter()
        self._outflow = Outflow()
        """The rate at which prompt tokens leave the queue, over all models."""
        self._paces: dict[str, Outflow] = {}
        """The rate at which nanoseconds of prefill leave the queue, by model.

        The model that has been without requests for longest is forgotten first.
        """
        self._promises = Promises()
        self.batch = 0
        """The number of waiting lines of batch jobs."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, generation: Generation) -> bool:
        return generation.placement.sequence_id in self._waiting

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._waiting.values()))

    def __getitem__(self, sequence_id: int) -> Generation:
        return self._waiting[sequence_id]

    @property
    def late(self) -> int:
        """The number of waiting choices whose first token can no longer meet its deadline."""
        return sum(line.late for line in self._lines.values())

    @property
    def hopeful_tokens(self) -> int:
        """The number of prompt tokens of waiting choices that can still meet their deadline."""
        return sum(line.hopeful_tokens for line in self._lines.values())

    def of(self, model: str) -> int:
        return len(self._lines.get(model, ()))

    def hopeful_of(self, model: str) -> int:
        line = self._lines.get(model)
        return line.hopeful_tokens if line else 0

    def batch_of(self, model: str) -> tuple[int, int]:
        """Return the number of batch lines that wait for one model, and the number of their prompt tokens."""
        return self._batch[model], self._batch_tokens[model]

    @property
    def wants_keys(self) -> bool:
        """Return whether requests need keys, because the queue is full or a refused request has a promised time."""
        return bool(self._promises) or len(self._waiting) >= self._max_waiting

    def check_room(self, count: int, now_ns: int, key: bytes = b"") -> None:
        """Raise QueueFull if the queue has no room for `count` more choices.

        The bound is lower for new requests while refused ones have promised times. `key` identifies a returning
        request; an empty key stands for a new one.
        """
        most = self._max_waiting
        if self._promises:
            self._promises.forget(now_ns)
            if self._promises and not self._promises.holds(key, now_ns):
                most = max(int(most * NEWCOMERS), 1)
        if len(self._waiting) + count > most:
            message = f"{len(self._waiting)} requests are waiting already"
            raise QueueFull(message, retry_after_s=self._come_back_s(key, count, now_ns))

    def kept(self, key: bytes) -> None:
        """Forget the promised time of a request that was admitted."""
        self._promises.kept(key)

    def _come_back_s(self, key: bytes, count: int, now_ns: int) -> float:
        drain_s, waiting = self.drain_s(now_ns), len(self._waiting)
        tokens_per_s, tokens = self._outflow.per_s(now_ns), self._tokens.total()
        if not (key and tokens_per_s and tokens and waiting):
            return drain_s
        per_s = tokens_per_s * waiting / tokens
        room_in_s = max(waiting - self._max_waiting * NEWCOMERS, 0.0) / per_s
        return self._promises.make(key, count, room_in_s=room_in_s, per_s=per_s, now_ns=now_ns) or drain_s

    def check_tenant(self, tenant: str, count: int, now_ns: int) -> None:
        """Raise QueueFull if `count` more choices of the tenant would use the room left for others."""
        if not self._tenants.are_distinct:
            return
        own, people = sum(each[tenant] for each in self._of_tenant.values()), len(self._waiting) - self.batch
        if count > queue_room(self._max_waiting, people, own, self._tenants.weight(tenant)):
            message = f"{own} requests of tenant {tenant} are waiting already, of {people} in all: others need room too"
            raise QueueFull(message, retry_after_s=self.drain_s(now_ns))

    def drain_s(self, now_ns: int) -> float:
        """Return the seconds until the queue is empty if it continues to drain at its recent rate."""
        return retry_after_s(self._tokens.total(), self._outflow.per_s(now_ns))

    def add(self, generation: Generation, now_ns: int) -> None:
        if not self._waiting:
            self._outflow.resume(now_ns)
        sequence_id, model = generation.placement.sequence_id, generation.model
        self._waiting[sequence_id] = generation
        if model not in self._lines:
            self._lines[model], self._fair[model] = Line(), FairTurns()
            self._resume_pace(model, now_ns)
        flow = generation.context.tenant, generation.context.service_class
        self._lines[model].add(sequence_id, generation, self._turn(sequence_id, generation, flow), flow, flow[0])
        self._unjudged.append(generation)
        self._count(generation, 1)

    def _resume_pace(self, model: str, now_ns: int) -> None:
        pace = self._paces[model] = self._paces.pop(model) if model in self._paces else Outflow()
        pace.resume(now_ns)
        if len(self._paces) > MOST_PACES:
            idle = next((each for each in self._paces if each not in self._lines), None)
            if idle is not None:
                del self._paces[idle]

    def remove(self, generation: Generation, *, bound: bool = False) -> bool:
        """Remove a choice and return whether it was waiting. `bound` means that it was bound to workers."""
        sequence_id, model = generation.placement.sequence_id, generation.model
        if self._waiting.pop(sequence_id, None) is None:
            return False
        if (found := self._turns.pop(sequence_id, None)) is not None:
            self._fair[model].left(*found, bound=bound)
        line = self._lines[model]
        line.remove(sequence_id)
        if not line:
            del self._lines[model], self._fair[model]
        self._count(generation, -1)
        return True

    def _count(self, generation: Generation, sign: int) -> None:
        model, tokens = generation.model, sign * generation.prompt_tokens
        self._tokens[model] += tokens
        if generation.pooled:
            self._pooled[model] += sign
        if not generation.batch:
            tenant, tenants = generation.context.tenant, self._of_tenant.setdefault(model, Counter())
            tenants[tenant] += sign
            if not tenants[tenant]:
                del tenants[tenant]
            if not tenants:
                del self._of_tenant[model]
        else:
            self.batch += sign
            self._batch[model] += sign
            self._batch_tokens[model] += tokens

    def _turn(self, sequence_id: int, generation: Generation, flow: Flow) -> int:
        """Return a choice's turn among tenants.

        Batch lines get none because they have separate shares. Choices that are queued again go first.
        """
        if generation.batch or generation.resumed:
            return 0
        self._turns[sequence_id] = found = self._fair[generation.model].came(
            flow, generation.prompt_tokens, self._tenants.weight(flow[0])
        )
        return found[1]

    def bound(self, generation: Generation, now_ns: int) -> None:
        """Remove a choice that was bound, and update the rates at which the queue drains."""
        line, prefill_ns = self._lines.get(generation.model), 0
        if line is not None:
            prefill_ns = line.bound(generation.placement.sequence_id)
        waited = self.remove(generation, bound=True) and now_ns - generation.timeline.queued_ns >= AT_ONCE_NS
        self._outflow.left(generation.prompt_tokens if waited else 0, now_ns)
        if (pace := self._paces.get(generation.model)) is not None:
            pace.left(prefill_ns if waited else 0, now_ns)

    def judge(self, workers: Sequence[WorkerView]) -> None:
        """Compute the time until which each new choice can meet its deadline, at the speed of the fastest worker."""
        if not self._unjudged:
            return
        unjudged, self._unjudged = self._unjudged, []
        speeds: dict[str, Speed] = {}
        for generation in unjudged:
            model = generation.model
            line = self._lines.get(model)
            if line is not None:
                if model not in speeds:
                    speeds[model] = fastest_speed(workers, model)
                tokens, cached = generation.tokens, max(generation.cached_hints.values(), default=0)
                prefill_ns = speeds[model].prompt_ns(max(tokens - cached, 1), tokens**2 - cached**2)
                prefill_ns += least_encode_ns(generation.placed_images, cached, workers, model)
                generation.hopeless_from_ns = hopeless_from_ns(generation, prefill_ns)
                line.judge(generation.placement.sequence_id, generation.hopeless_from_ns, round(prefill_ns))

    def in_order(
        self,
        now_ns: int,
        workers: Sequence[WorkerView] | None = None,
        places: TenantPlaces | None = None,
        *,
        may_start: Callable[[Generation], bool] | None = None,
        all_waiting: bool = False,
    ) -> list[Generation]:
        """Return the waiting choices of each model in the order in which to bind them.

        At most as many are returned per model as `workers` have room for; None stands for unlimited room, and
        `all_waiting` returns all. `may_start` filters the choices, and `places` applies tenants' shares. While no
        worker has room to decode, only choices that need no decode worker are returned.
        """
        found: list[Generation] = []
        room = None if workers is None else rooms(workers)
        prompt_room = prompt_rooms(workers) if workers is not None and self._pooled.total() else {}
        for model, line in self._lines.items():
            free = len(line) if room is None else room.get(model, 0)
            beside = prompt_room.get(model, 0) if self._pooled[model] else 0
            if not free and not beside and not all_waiting:
                continue
            # The order does not matter while no prompt can start.
            pace = self._paces[model].per_ns(now_ns) if workers and prompts_may_start(workers, model) else None
            waiting = line.in_order(now_ns, pace)
            ready = waiting if may_start is None else filter(may_start, waiting)
            if not free and not all_waiting:
                ready = (each for each in ready if each.pooled)
            if places is not None:
                ready = places.within(model, ready, self._of_tenant.get(model, {}), free, now_ns)
            found.extend(ready if all_waiting else islice(ready, free + beside))
        return found

    def by_tenant(self) -> Mapping[str, Mapping[str, int]]:
        """Return the number of waiting choices by model and tenant, without batch lines. Zeros are absent."""
        return self._of_tenant

    def demand(self, model: str, now_ns: int) -> QueuedDemand:
        """Return the model's queue in the form that its workers receive."""
        line = self._lines.get(model)
        if line is None:
            return QueuedDemand()
        return QueuedDemand(
            waiting=len(line),
            waiting_tokens=self._tokens[model],
            head_deadline_unix_ns=line.head_deadline_ns(now_ns),
        )


def expired(
    waiting: Iterable[Generation],
    workers: list[WorkerView],
    wait_bounds: WaitBounds,
    *,
    now_ns: int,
    drain_s: float,
    cold: ColdModels | None = None,
) -> list[tuple[Generation, FulcrumError]]:
    """Return the choices that have waited too long, with their errors.

    `cold` decides on models of the catalogue that no worker serves.
    """
    found: list[tuple[Generation, FulcrumError]] = []
    generates, computes = cache(partial(serves, workers)), cache(partial(computes_prompts, workers))
    for generation in waiting:
        model, served = generation.model, computes if generation.pooled else generates
        if cold is not None and cold.covers(model) and not served(model):
            waited_s = (now_ns - generation.timeline.queued_ns) / 1e9
            error = cold.ends(model, waited_s, begun=bool(generation.output))
            if error is not None:
                found.append((generation, error))
            continue
        match wait_bounds.ends(now_ns - generation.timeline.queued_ns, partial(served, model)):
            case Expiry.NO_WORKERS:
                message = f"no worker serves model {model!r} now{why_not(workers, model)}"
                found.append((generation, NoWorkers(message, retry_after_s=RETRY_AFTER_S)))
            case Expiry.NO_ROOM:
                message = f"no worker had room within {wait_bounds.max_wait_ms} ms"
                found.append((generation, QueueFull(message, retry_after_s=drain_s)))
            case None:
                pass
    return found


# The bound on models whose arrivals are counted.
MAX_MODELS: Final = 64


class Arrivals:
    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._images: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        """The number of lines of batch jobs that have not ended, by model."""

    def came(self, generation: Generation) -> None:
        """Count a new choice. Choices that are queued again must not be passed."""
        if generation.batch:
            self._lines[generation.model] += 1
        elif generation.model in self._tokens or len(self._tokens) < MAX_MODELS:
            self._tokens[generation.model] += generation.prompt_tokens
            if generation.images:
                self._images[generation.model] += len(generation.images)

    def ended(self, generation: Generation) -> None:
        """Record the end of a choice that was counted."""
        if generation.batch:
            self._lines[generation.model] -= 1
            if not self._lines[generation.model]:
                del self._lines[generation.model]

    def queues(self, waiting: WaitingQueue, links: Links) -> list[Queue]:
        """Return the queues by model and phase with counts of arrivals. Models with empty queues are included."""
        found = {each.model: each for each in (model_queues(waiting, links.views()) if len(waiting) else ())}
        models = [*found, *((self._tokens.keys() | self._lines.keys()) - found.keys())]
        return [self._with_waiting(found.get(model) or Queue(model), waiting) for model in models]

    def _with_waiting(self, queue: Queue, waiting: WaitingQueue) -> Queue:
        lines, tokens = waiting.batch_of(queue.model)
        return replace(
            queue,
            hopeful_tokens=waiting.hopeful_of(queue.model),
            arrived_tokens=self._tokens[queue.model],
            arrived_images=self._images[queue.model],
            batch_requests=lines,
            batch_tokens=tokens,
            batch_bound=max(self._lines[queue.model] - lines, 0),
        )
