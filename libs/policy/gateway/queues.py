"""The lengths of the queue, and the times at which refused clients should retry.

A retry time follows from the measured outflow of the queue. Every refused client gets its own time, for which room is
reserved. While promises are outstanding, newcomers fill the queue to `NEWCOMERS` of its bound. The rest is reserved for
clients that return at their promised time. Promised times are spaced a little wider than requests leave the queue, so
that returning clients find room and newcomers take the remainder.
"""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from math import ceil, exp
from typing import Final, Protocol

from libs.policy.gateway.view import WorkerView


class Queued(Protocol):
    """The properties of a waiting request that determine the phase it waits for."""

    @property
    def model(self) -> str: ...

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and the output so far."""
        ...

    @property
    def images(self) -> Sized: ...

    @property
    def decodes_next(self) -> bool:
        """Return whether the request's prompt is computed and its blocks wait for a decode worker."""
        ...

    @property
    def pooled(self) -> bool:
        """Return whether the request's prompt becomes a vector, so that it needs no decode worker."""
        ...


@dataclass(slots=True)
class Queue:
    """The requests waiting for one model, by the phase that has no room."""

    model: str
    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_prompt_tokens: int = 0
    hopeful_tokens: int = 0
    """The prompt tokens of all waiting requests whose first token can still be in time."""
    arrived_tokens: int = 0
    """The prompt tokens of all requests received so far, without batch lines."""
    batch_requests: int = 0
    batch_tokens: int = 0
    """The prompt tokens of the waiting batch lines."""
    batch_bound: int = 0
    """The batch lines that are bound to workers."""
    images: int = 0
    """The images of the waiting prompts."""
    arrived_images: int = 0
    """The images of the prompts in `arrived_tokens`."""

    @property
    def waits(self) -> bool:
        return bool(self.prefill_requests or self.decode_requests)


def model_queues(waiting: Iterable[Queued], workers: Sequence[WorkerView]) -> list[Queue]:
    """Return the queue of each model with waiting requests.

    Requests are bound in order, so the cause that holds up the first request of a model holds up all its uncomputed
    prompts.
    """
    found: dict[str, Queue] = {}
    lacks_decode: dict[str, bool] = {}
    for each in waiting:
        model = each.model
        if model not in found:
            found[model] = Queue(model)
            lacks_decode[model] = lacks_decode_only([view for view in workers if view.model == model])
        queue = found[model]
        if each.decodes_next:
            queue.decode_requests += 1
            continue
        queue.images += len(each.images)
        if lacks_decode[model] and not each.pooled:
            queue.decode_requests += 1
            queue.decode_prompt_tokens += each.tokens
        else:
            queue.prefill_requests += 1
            queue.prefill_tokens += each.tokens
    return list(found.values())


def lacks_decode_only(workers: Sequence[WorkerView]) -> bool:
    """Return whether a model's workers could compute a prompt now, and lack only a place to decode it."""
    if not workers or any(view.decode_credits > 0 for view in workers if view.takes_decode or view.takes_both):
        return False
    prompts = [view.prefill_credits > 0 for view in workers if view.takes_prefill]
    return any(prompts) or not prompts


AGES: Final = 12
"""The classes of age, each twice as long as the one before: below 32 ms, below 64 ms, ..., from 32.768 s on."""
FIRST_AGE_BITS: Final = 5
MS_NS: Final = 1_000_000


class Awaiting(Protocol):
    """The properties of an unfinished choice that determine its wait for a first token."""

    @property
    def model(self) -> str: ...

    @property
    def batch(self) -> bool: ...

    @property
    def output(self) -> Sized: ...

    @property
    def arrival_unix_ns(self) -> int: ...

    @property
    def ttft_deadline_unix_ns(self) -> int:
        """The deadline of the choice's first token; 0 for none."""
        ...


@dataclass(slots=True)
class WaitingAges:
    """The choices of one model that wait for their first token, by age."""

    requests: list[int] = field(default_factory=lambda: [0] * AGES)
    total_ms: list[int] = field(default_factory=lambda: [0] * AGES)
    """The sum of the ages in each class."""
    overdue: int = 0
    """The number of choices whose first token is overdue."""

    def add(self, age_ms: int, *, overdue: bool) -> None:
        at = min((age_ms >> FIRST_AGE_BITS).bit_length(), AGES - 1)
        self.requests[at] += 1
        self.total_ms[at] += age_ms
        self.overdue += overdue


def first_token_waits(live: Iterable[Awaiting], now_ns: int) -> dict[str, WaitingAges]:
    """Return the waits for first tokens by model. Lines of batch jobs are left out, since nobody waits for them."""
    found: dict[str, WaitingAges] = {}
    for each in live:
        if each.output or each.batch:
            continue
        ages = found.get(each.model)
        if ages is None:
            ages = found[each.model] = WaitingAges()
        age_ms = max(now_ns - each.arrival_unix_ns, 0) // MS_NS
        ages.add(age_ms, overdue=0 < each.ttft_deadline_unix_ns < now_ns)
    return found


MEMORY_S = 10.0
"""The age at which a departure weighs 1/e of a current one."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

NEWCOMERS: Final = 0.5
"""The share of the queue that newcomers may fill while promises are outstanding."""
PACE: Final = 0.9
"""The share of the measured outflow that is promised.

It is below 1 because the outflow varies and promises must hold.
"""
# A client may return this much too early or too late.
EARLY_NS: Final = 1_000_000_000
GRACE_NS: Final = 5_000_000_000
MAX_PROMISES: Final = 16_384
HORIZON_S: Final = 600.0
"""The furthest ahead that a client is asked to return."""
SECOND_NS: Final = 1_000_000_000


class Outflow:
    """The rate at which requests leave the queue for workers, measured only while requests wait.

    Amounts are prompt tokens, or nanoseconds of their prefill.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        # The time over which `_amount` was collected; it decays at the same rate.
        self._measured_s = 0.0
        self._seen_ns = 0

    def resume(self, now_ns: int) -> None:
        """Restart the clock once a request waits again; an empty queue does not measure the workers' speed."""
        self._seen_ns = now_ns

    def left(self, amount: int, now_ns: int) -> None:
        """Record that an amount has left the queue."""
        amount_before, self._measured_s = self._as_of(now_ns)
        self._amount = amount_before + amount
        self._seen_ns = max(now_ns, self._seen_ns)

    def per_s(self, now_ns: int) -> float | None:
        """Return the decayed amount per second; None before anything was measured."""
        # Reading must not change the state: the frequency of reads says nothing about the workers.
        amount, measured_s = self._as_of(now_ns)
        return amount / measured_s if measured_s > 0 and amount else None

    def per_ns(self, now_ns: int) -> float | None:
        per_s = self.per_s(now_ns)
        return per_s / 1e9 if per_s else None

    def _as_of(self, now_ns: int) -> tuple[float, float]:
        """Return the departed amount and the time behind it, both decayed to `now_ns`."""
        passed_s = max(now_ns - self._seen_ns, 0) / 1e9
        kept = exp(-passed_s / MEMORY_S)
        return self._amount * kept, self._measured_s * kept + MEMORY_S * (1 - kept)


def retry_after_s(queued_tokens: int, tokens_per_s: float | None) -> float:
    """Return the time until the queue has drained at this rate, within bounds; the lower bound if the rate is
    unknown.
    """
    if not tokens_per_s:
        return MIN_RETRY_AFTER_S
    return min(max(queued_tokens / tokens_per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


class Promises:
    """The return times promised to refused requests, by a key that is the same when a request is resent."""

    def __init__(self) -> None:
        # In the order they were made, which is nearly the order in which they are due.
        self._due_ns: dict[bytes, int] = {}
        # The earliest time of the next promise.
        self._next_ns = 0

    def __bool__(self) -> bool:
        return bool(self._due_ns)

    def forget(self, now_ns: int) -> None:
        """Drop the promises whose clients have not returned in time."""
        while self._due_ns:
            key, due_ns = next(iter(self._due_ns.items()))
            if due_ns + GRACE_NS >= now_ns:
                return
            del self._due_ns[key]

    def holds(self, key: bytes, now_ns: int) -> bool:
        """Return whether the request returns at its promised time."""
        due_ns = self._due_ns.get(key)
        return due_ns is not None and due_ns - EARLY_NS <= now_ns <= due_ns + GRACE_NS

    def kept(self, key: bytes) -> None:
        """Drop the promise of a request that has been admitted."""
        self._due_ns.pop(key, None)

    def make(self, key: bytes, count: int, *, room_in_s: float, per_s: float, now_ns: int) -> float | None:
        """Return Retry-After in whole seconds, or None if it cannot be estimated.

        `count` is the number of choices of the request. `room_in_s` is the expected wait for room, `per_s` the rate at
        which choices leave the queue.
        """
        self.forget(now_ns)
        known_ns = self._due_ns.get(key, 0)
        if known_ns > now_ns + EARLY_NS:  # it is early, and its promised time still applies
            return float(ceil((known_ns - now_ns) / SECOND_NS))
        if not key or per_s <= 0 or len(self._due_ns) >= MAX_PROMISES:
            return None
        slot_ns = max(self._next_ns, now_ns + round(room_in_s * SECOND_NS))
        wait_s = max(ceil((slot_ns - now_ns) / SECOND_NS), 1)
        if wait_s > HORIZON_S:
            return None
        self._next_ns = slot_ns + round(count / (PACE * per_s) * SECOND_NS)
        self._due_ns.pop(key, None)
        self._due_ns[key] = now_ns + wait_s * SECOND_NS
        return float(wait_s)
