"""A pool of workers as a queue, which finds the lab's edge roughly in a thousandth of the lab's time.

Prompts are served one after the other. Decoding sequences share their worker: between two events all its sequences
advance together. The number of tokens in a given time, with KV that grows meanwhile, has a closed form.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import sqrt

from libs.lab.traces.request import TraceRequest
from libs.policy.capacity.phase_work import WorkerKind, prefill_seconds
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.pace import IN_HAND

LimitS = Callable[[TraceRequest], float]
"""The time limit for a request's first token, in seconds."""


def prompts_in_time(requests: Sequence[TraceRequest], kind: WorkerKind, workers: int, limit_s: LimitS) -> list[bool]:
    """Return for each request whether its prompt is computed in time if decodes take no time."""
    free_s = [0.0] * workers
    found = []
    for request in requests:
        arrival_s = request.arrival_ns / 1e9
        at = min(range(workers), key=free_s.__getitem__)
        free_s[at] = max(free_s[at], arrival_s) + prefill_seconds(kind, request.input_tokens)
        found.append(free_s[at] - arrival_s <= limit_s(request))
    return found


def answers_in_time(
    requests: Sequence[TraceRequest], kind: WorkerKind, workers: int, limit_s: LimitS, tpot_s: float
) -> list[bool]:
    """Return for each request whether it is decoded in time if prompts take no time."""
    return _Pool(kind, workers, limit_s, tpot_s, [False] * len(requests)).run(requests)


@dataclass(slots=True)
class _Worker:
    """The sequences that decode together on one worker."""

    model: StepTimeModel
    at_s: float = 0.0
    """The time up to which `tokens` and `kv` are valid."""
    tokens: float = 0.0
    """The tokens that a sequence would have if it had run from the beginning."""
    kv: float = 0.0
    reserved: int = 0
    """The KV tokens of all running sequences at their ends."""
    running: list[tuple[float, int, TraceRequest, float]] = field(default_factory=list)
    """A heap of (tokens at which it ends, index, request, start time)."""
    version: int = 0

    def step_s(self, more: int = 0, more_kv: float = 0.0) -> float:
        """Return the time of one step with `more` sequences added."""
        count = len(self.running) + more
        own_ns = self.model.decode_sequence_ns * count + self.model.decode_kv_token_ns * (self.kv + more_kv)
        return (self.model.reading_ns(count) + own_ns) / 1e9

    def advance(self, now_s: float) -> None:
        """Advance all sequences to `now_s`; a token takes `step`, and `growth` more for each one before it."""
        passed_s, self.at_s = now_s - self.at_s, now_s
        count = len(self.running)
        if not count or passed_s <= 0:
            return
        step, growth = self.step_s(), self.model.decode_kv_token_ns * count / 1e9
        made = 2 * passed_s / (step + sqrt(step * step + 2 * growth * passed_s))
        self.tokens += made
        self.kv += made * count

    def ends_s(self) -> float:
        """Return the time at which the first of its sequences ends."""
        left = max(self.running[0][0] - self.tokens, 0.0)
        growth = self.model.decode_kv_token_ns * len(self.running) / 1e9
        return self.at_s + left * (self.step_s() + growth * left / 2)


class _Pool:
    """A pool of workers behind one queue."""

    def __init__(self, kind: WorkerKind, workers: int, limit_s: LimitS, tpot_s: float, good: list[bool]) -> None:
        self._kind = kind
        self._workers = [_Worker(kind.speed.step_time) for _ in range(workers)]
        self._limit_s = limit_s
        self._tpot_s = tpot_s
        self._good = good
        self._waiting: deque[tuple[int, TraceRequest]] = deque()
        self._ends: list[tuple[float, int, int]] = []
        """A heap of (end time, worker, version of the worker)."""

    def run(self, requests: Sequence[TraceRequest]) -> list[bool]:
        """Run until all requests have ended."""
        for place, request in enumerate(requests):
            arrival_s = request.arrival_ns / 1e9
            self._end_until(arrival_s)
            self._waiting.append((place, request))
            self._begin(arrival_s)
        self._end_until(float("inf"))
        return self._good

    def _begin(self, now_s: float) -> None:
        while self._waiting:
            place, request = self._waiting[0]
            rooms = [at for at, each in enumerate(self._workers) if self._has_room(each, request)]
            if not rooms:
                return
            self._waiting.popleft()
            at = min(rooms, key=lambda each: self._workers[each].step_s())
            worker = self._workers[at]
            worker.advance(now_s)
            tokens = request.input_tokens + request.output_tokens
            heappush(worker.running, (worker.tokens + max(request.output_tokens - 1, 0), place, request, now_s))
            worker.kv += request.input_tokens
            worker.reserved += tokens
            self._expect(at)

    def _has_room(self, worker: _Worker, request: TraceRequest) -> bool:
        if not worker.running:
            return True
        fits = worker.reserved + request.input_tokens + request.output_tokens <= (self._kind.kv_tokens or 1 << 62)
        if not fits or len(worker.running) >= self._kind.max_sequences:
            return False
        return worker.step_s(1, request.input_tokens) <= self._tpot_s * (1 - IN_HAND)

    def _expect(self, at: int) -> None:
        worker = self._workers[at]
        worker.version += 1
        if worker.running:
            heappush(self._ends, (worker.ends_s(), at, worker.version))

    def _end_until(self, until_s: float) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            now_s, at, version = heappop(self._ends)
            worker = self._workers[at]
            if worker.version != version:
                continue
            worker.advance(now_s)
            _, place, request, began_s = heappop(worker.running)
            worker.kv = max(worker.kv - request.input_tokens - request.output_tokens, 0.0)
            worker.reserved -= request.input_tokens + request.output_tokens
            waited_s = began_s - request.arrival_ns / 1e9
            paced = now_s - began_s <= self._tpot_s * max(request.output_tokens - 1, 1)
            self._good[place] = waited_s <= self._limit_s(request) and paced
            self._expect(at)
            self._begin(now_s)
