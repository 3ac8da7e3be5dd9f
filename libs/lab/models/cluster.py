"""Many models on a few GPUs in virtual time: steps of workers that share a GPU, loads over its link, and request
queues.

A GPU is divided into workers, each with memory of its own, whose engine steps take turns. A load transfers the
weights over the GPU's link, one load at a time, and then takes a fixed time, while the neighbours continue. Weights
lie in host memory.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from libs.lab.models.aegaeon import AegaeonModel, ServedRequest
from libs.policy.step_time import StepWork

MOST_PREFILL_TOKENS: Final = 4_096
"""The most prompt tokens in one step."""
NEVER_S: Final = 1e9
AFTER_S: Final = 60.0
"""Requests not served this long after the last arrival count as never served."""


@dataclass(frozen=True, slots=True)
class LoadCost:
    bytes_per_s: float
    fixed_s: float

    def load_s(self, model: AegaeonModel) -> float:
        """Return the time of a load that has the link to itself."""
        return model.weights_bytes / self.bytes_per_s + self.fixed_s


@dataclass(slots=True)
class LabPlace:
    """A worker on a part of a GPU."""

    number: int
    gpu: int
    memory_bytes: float
    model: AegaeonModel | None = None
    """The model that the worker holds or is loading."""
    since_s: float = 0.0
    ready_s: float = 0.0
    """When a load that is in progress ends; 0 if none is."""
    goal: AegaeonModel | None = None
    """The model to load once the last answers have ended."""
    cut_s: float = 0.0
    """The time at which the last answers are cut off before a switch."""
    steps_now: bool = False
    """Whether a step of this worker is running."""
    pending: deque[ServedRequest] = field(default_factory=deque)
    """Requests whose prompts are still to be computed."""
    ends: list[tuple[int, int, ServedRequest]] = field(default_factory=list)
    """A heap of running requests by the step in which they end."""
    steps: int = 0
    kv_tokens: int = 0
    """KV tokens of running requests at their current length."""
    kept_tokens: int = 0
    """KV tokens reserved for running requests at their full length."""

    @property
    def serves(self) -> bool:
        """Whether a request for its model can be given to this worker."""
        return self.model is not None and not self.ready_s and self.goal is None

    @property
    def is_busy(self) -> bool:
        """Whether any request runs or is pending here."""
        return bool(self.pending or self.ends)

    def prompts(self) -> list[ServedRequest]:
        """Take the requests that go into the next step from `pending`."""
        found: list[ServedRequest] = []
        model, tokens = self.model, 0
        assert model is not None
        room = int((self.memory_bytes - model.weights_bytes) / model.kv_bytes_per_token)
        while self.pending:
            first = self.pending[0]
            length = first.input_tokens + first.output_tokens
            computed = first.input_tokens + first.done_tokens
            if self.kept_tokens + length > room and (self.ends or found):
                break
            if found and tokens + computed > MOST_PREFILL_TOKENS:
                break
            found.append(self.pending.popleft())
            tokens += computed
            self.kept_tokens += length
        return found


class KeepingRule(Protocol):
    """A rule that assigns models to workers."""

    period_s: float

    def decide(self, now_s: float, lab: "ModelsLab") -> Sequence[tuple[LabPlace, AegaeonModel]]:
        """Return the workers that are to switch models now, with their new models."""


class ModelsLab:
    """The replay of one request log on a set of GPUs under one rule."""

    def __init__(
        self,
        models: Mapping[str, AegaeonModel],
        requests: Sequence[ServedRequest],
        places: Sequence[LabPlace],
        link: LoadCost,
        rule: KeepingRule,
        *,
        drain_s: float = NEVER_S,
    ) -> None:
        """`drain_s` is how long the answers of a worker that switches models may continue. Those cut off then wait for
        their model again.
        """
        self.models, self.requests, self.places, self.link = models, requests, places, link
        self.waiting: dict[str, deque[ServedRequest]] = {name: deque() for name in models}
        self.arrived: Counter[str] = Counter()
        self.last_s: dict[str, float] = dict.fromkeys(models, 0.0)
        self.switches = self.cuts = 0
        self._drain_s = drain_s
        self._rule = rule
        self._by_gpu = [[each for each in places if each.gpu == gpu] for gpu in sorted({each.gpu for each in places})]
        self._turn = [0] * len(self._by_gpu)
        self._stepping = [False] * len(self._by_gpu)
        self._link_free_s = [0.0] * len(self._by_gpu)
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = count()

    def run(self) -> None:
        """Run to the end, recording the result of each request in it."""
        for each in self.requests:
            self._at(each.t_s, "arrive", each)
        end_s = (self.requests[-1].t_s if self.requests else 0.0) + AFTER_S
        self._at(0.0, "decide", None)
        while self._events:
            now_s, _, kind, what = heapq.heappop(self._events)
            if now_s > end_s:
                return
            if kind == "step":
                self._step_ended(now_s, what)  # type: ignore[arg-type]
            elif kind == "arrive":
                self._arrive(now_s, what)  # type: ignore[arg-type]
            elif kind == "cut":
                self._left(now_s, what)  # type: ignore[arg-type]
            elif kind == "loaded":
                self._loaded(now_s, what)  # type: ignore[arg-type]
            else:
                self._decide(now_s)
                self._at(now_s + self._rule.period_s, "decide", None)

    def in_flight(self) -> Counter[str]:
        """Return the number of unanswered requests by model."""
        found: Counter[str] = Counter({name: len(waiting) for name, waiting in self.waiting.items() if waiting})
        for place in self.places:
            if place.model is not None and place.is_busy:
                found[place.model.name] += len(place.pending) + len(place.ends)
        return found

    # ------------------------------------------------------------ what happens

    def _at(self, at_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, what))

    def _arrive(self, now_s: float, request: ServedRequest) -> None:
        name = request.model
        self.arrived[name] += 1
        self.last_s[name] = now_s
        serving = [each for each in self.places if each.model is not None and each.model.name == name and each.serves]
        if serving:
            place = min(serving, key=lambda each: (len(each.pending) + len(each.ends), each.number))
            place.pending.append(request)
            self._step(now_s, place.gpu)
            return
        request.waits_since_s = now_s
        self.waiting[name].append(request)
        self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        for place, model in self._rule.decide(now_s, self):
            self.switches += 1
            place.goal, place.cut_s = model, now_s + self._drain_s
            if self._drain_s and place.is_busy:
                self._at(place.cut_s, "cut", place)
            self._left(now_s, place)

    def _left(self, now_s: float, place: LabPlace) -> None:
        """Begin the pending load if nothing runs any more, or if what runs has used up its time."""
        if place.goal is None or place.steps_now:
            return
        if place.is_busy:
            if now_s < place.cut_s:
                return
            self._hand_back(now_s, place)
        place.model, place.goal = place.goal, None
        begins_s = max(now_s, self._link_free_s[place.gpu])
        copy_s = place.model.weights_bytes / self.link.bytes_per_s
        self._link_free_s[place.gpu] = begins_s + copy_s
        place.since_s, place.ready_s = now_s, begins_s + copy_s + self.link.fixed_s
        self._at(place.ready_s, "loaded", place)

    def _hand_back(self, now_s: float, place: LabPlace) -> None:
        """Return running requests to the queue. Their tokens so far are computed again once the model is loaded."""
        assert place.model is not None
        for end, _, each in place.ends:
            each.done_tokens = max(each.output_tokens - (end - place.steps), 0)
        found = [*place.pending, *(each for _, _, each in sorted(place.ends))]
        for each in found:
            each.waits_since_s = now_s if each.done_tokens else each.t_s
        self.cuts += len(place.ends)
        self.waiting[place.model.name].extend(found)
        place.pending.clear()
        place.ends.clear()
        place.kv_tokens = place.kept_tokens = 0

    def _loaded(self, now_s: float, place: LabPlace) -> None:
        place.ready_s, place.since_s = 0.0, now_s
        assert place.model is not None
        waiting = self.waiting[place.model.name]
        place.pending.extend(waiting)
        waiting.clear()
        self._step(now_s, place.gpu)

    def _step(self, now_s: float, gpu: int) -> None:
        """Begin the next step of a GPU unless one is running."""
        if self._stepping[gpu]:
            return
        places = self._by_gpu[gpu]
        for shift in range(len(places)):
            turn = (self._turn[gpu] + shift) % len(places)
            place = places[turn]
            if not place.is_busy or place.model is None:
                continue
            self._turn[gpu] = turn + 1
            times, prompts = place.model.step_time, place.prompts()
            if prompts:
                lengths = [each.input_tokens + each.done_tokens for each in prompts]
                took_ns = times.chunks_ns(sum(lengths), sum(length**2 for length in lengths))
            else:
                took_ns = times.decode_ns(StepWork(decode_sequences=len(place.ends), decode_kv_tokens=place.kv_tokens))
            self._stepping[gpu] = place.steps_now = True
            self._at(now_s + took_ns / 1e9, "step", (place, prompts))
            return

    def _step_ended(self, now_s: float, what: tuple[LabPlace, list[ServedRequest]]) -> None:
        place, prompts = what
        self._stepping[place.gpu] = place.steps_now = False
        for each in prompts:
            each.first_s = each.first_s or now_s
            each.done_tokens += 1
            place.kv_tokens += each.input_tokens + each.done_tokens
            left = max(each.output_tokens - each.done_tokens, 1)
            heapq.heappush(place.ends, (place.steps + left, next(self._numbers), each))
        if not prompts:
            place.steps += 1
            place.kv_tokens += len(place.ends)
            while place.ends and place.ends[0][0] <= place.steps:
                each = heapq.heappop(place.ends)[2]
                each.end_s = now_s
                place.kv_tokens -= each.input_tokens + each.output_tokens
                place.kept_tokens -= each.input_tokens + each.output_tokens
            place.kv_tokens = max(place.kv_tokens, 0)
        self._left(now_s, place)
        self._step(now_s, place.gpu)


def cut(gpus: int, parts_bytes: Sequence[float]) -> list[LabPlace]:
    """Return the workers of `gpus` GPUs, each divided into `parts_bytes`."""
    numbers: Iterator[int] = count()
    return [LabPlace(next(numbers), gpu, part) for gpu in range(gpus) for part in parts_bytes]
