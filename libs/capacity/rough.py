"""A pool of workers as a queue: where about the lab's edge is, in a thousandth of the lab's time. Pure.

Prompts are served one after the other. Decoding sequences share their worker: between two events all of a worker's
sequences advance together, and how many tokens a time gives, with KV that grows meanwhile, is a closed form.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import sqrt

from libs.lab.traces.request import TraceRequest
from libs.policy.capacity.phase_work import WorkerKind, prefill_seconds
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.slack import IN_HAND

LimitS = Callable[[TraceRequest], float]
"""Within which a request's first token has to come."""


def prompts_in_time(requests: Sequence[TraceRequest], kind: WorkerKind, workers: int, limit_s: LimitS) -> list[bool]:
    """Whether each request's prompt is computed in time, where nothing else takes any."""
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
    """Whether each request is decoded in time, where prompts take none."""
    return _Pool(kind, workers, limit_s, tpot_s, [False] * len(requests)).run(requests)


@dataclass(slots=True)
class _Worker:
    """Sequences that decode together."""

    model: StepTimeModel
    at_s: float = 0.0
    """Up to when `tokens` and `kv` are known."""
    tokens: float = 0.0
    """That each sequence would have if it had been there from the beginning."""
    kv: float = 0.0
    reserved: int = 0
    """Tokens of KV once all are done."""
    running: list[tuple[float, int, TraceRequest, float]] = field(default_factory=list)
    """(tokens at which it ends, place, request, when it began), a heap."""
    version: int = 0

    def step_s(self, more: int = 0, more_kv: float = 0.0) -> float:
        """Time of one step with `more` sequences added."""
        count = len(self.running) + more
        own_ns = self.model.decode_sequence_ns * count + self.model.decode_kv_token_ns * (self.kv + more_kv)
        return (self.model.reading_ns(count) + own_ns) / 1e9

    def advance(self, now_s: float) -> None:
        """Up to now; a token takes `step`, and `growth` more for each token before it."""
        passed_s, self.at_s = now_s - self.at_s, now_s
        count = len(self.running)
        if not count or passed_s <= 0:
            return
        step, growth = self.step_s(), self.model.decode_kv_token_ns * count / 1e9
        made = 2 * passed_s / (step + sqrt(step * step + 2 * growth * passed_s))
        self.tokens += made
        self.kv += made * count

    def ends_s(self) -> float:
        """When the first of its sequences does."""
        left = max(self.running[0][0] - self.tokens, 0.0)
        growth = self.model.decode_kv_token_ns * len(self.running) / 1e9
        return self.at_s + left * (self.step_s() + growth * left / 2)


class _Pool:
    """Workers, and one queue before them."""

    def __init__(self, kind: WorkerKind, workers: int, limit_s: LimitS, tpot_s: float, good: list[bool]) -> None:
        self._kind = kind
        self._workers = [_Worker(kind.speed.step_time) for _ in range(workers)]
        self._limit_s = limit_s
        self._tpot_s = tpot_s
        self._good = good
        self._waiting: deque[tuple[int, TraceRequest]] = deque()
        self._ends: list[tuple[float, int, int]] = []
        """(when, worker, its version), a heap."""

    def run(self, requests: Sequence[TraceRequest]) -> list[bool]:
        """Until all have ended."""
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
