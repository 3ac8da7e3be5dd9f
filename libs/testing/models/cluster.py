"""Many models on a few GPUs in virtual time: steps of workers that share a GPU, loads over its link, request queues.

A GPU is divided into workers, each with memory of its own, whose engine steps take turns. A load transfers the
weights over the GPU's link, one load at a time, and then takes a fixed time, while the neighbours continue. Weights
lie in host memory. The workload is Aegaeon's (SOSP 2025): models of 6 to 14 billion parameters, each requested rarely,
with ShareGPT lengths. Step times were measured on H800s (docs/profiles.md).
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

import numpy as np

from libs.perfmodel.profiles import profile
from libs.policy.step_time import StepTimeModel, StepWork

TTFT_S: Final = 10.0
TPOT_S: Final = 0.1
KINDS: Final[Mapping[str, float]] = {
    "yi1.5-6b-h800": 12.1e9,
    "qwen2.5-7b-h800": 15.2e9,
    "llama2-13b-h800": 26.0e9,
    "internlm2.5-7b-h800": 15.5e9,
    "yi1.5-9b-h800": 17.7e9,
    "qwen1.5-14b-h800": 28.3e9,
}
"""Bytes of weights (two a parameter) by profile; models are of these kinds in turn."""
INPUT_TOKENS, INPUT_SIGMA = 700.0, 1.2
OUTPUT_TOKENS, OUTPUT_SIGMA = 300.0, 0.6
"""Means and sigmas of log-normal lengths, with the means of Aegaeon's own logs."""
MOST_TOKENS: Final = 4_000


@dataclass(frozen=True, slots=True)
class AegaeonModel:
    """A model of the catalogue with its size and step times."""

    name: str
    weights_bytes: float
    kv_bytes_per_token: int
    step_time: StepTimeModel


@dataclass(slots=True)
class ServedRequest:
    """A request with its progress so far."""

    t_s: float
    model: str
    input_tokens: int
    output_tokens: int
    done_tokens: int = 0
    """Output tokens it had when it last began to run."""
    waits_since_s: float = 0.0
    first_s: float = 0.0
    """The time of the first token; 0 if there is none yet."""
    end_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Return whether the answer was complete within the limits of TTFT and TPOT."""
        if not self.end_s:
            return False
        tpot_s = (self.end_s - self.first_s) / max(self.output_tokens - 1, 1)
        return self.first_s - self.t_s <= TTFT_S and tpot_s <= TPOT_S


def models_of(number: int) -> dict[str, AegaeonModel]:
    """Return `number` models, cycling through the kinds."""
    found = {}
    for place, (kind, weights) in zip(range(number), _turns(), strict=False):
        known = profile(kind)
        name = f"model-{place:03}"
        found[name] = AegaeonModel(name, weights, known.kv_bytes_per_token, known.step_time)
    return found


def _turns() -> Sequence[tuple[str, float]]:
    return list(KINDS.items()) * 100


def requests_of(models: Mapping[str, AegaeonModel], rate: float, seconds: float, seed: int) -> list[ServedRequest]:
    """Draw Poisson arrivals at `rate` requests a second to each model, sorted by time."""
    found = []
    for place, name in enumerate(models):
        rng = np.random.default_rng([seed, place])
        times = np.sort(rng.uniform(0, seconds, int(rng.poisson(rate * seconds))))
        inputs = _lengths(rng, INPUT_TOKENS, INPUT_SIGMA, len(times))
        outputs = _lengths(rng, OUTPUT_TOKENS, OUTPUT_SIGMA, len(times))
        found += [
            ServedRequest(t_s, name, isl, osl)
            for t_s, isl, osl in zip(times.tolist(), inputs, outputs, strict=True)
        ]  # fmt: skip
    return sorted(found, key=lambda each: each.t_s)


def _lengths(rng: np.random.Generator, mean: float, sigma: float, number: int) -> list[int]:
    drawn = rng.lognormal(np.log(mean) - sigma * sigma / 2, sigma, number)
    return [int(each) for each in np.clip(np.round(drawn), 2, MOST_TOKENS).tolist()]


def good_share(requests: Sequence[ServedRequest], from_s: float) -> float:
    """Return the share of good requests among those that arrived from `from_s` on."""
    counted = [each for each in requests if each.t_s >= from_s]
    return sum(each.is_good for each in counted) / max(len(counted), 1)


MOST_PREFILL_TOKENS: Final = 4_096
"""The maximum number of prompt tokens in one step."""
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
class GpuShare:
    """A worker on a part of a GPU."""

    number: int
    gpu: int
    memory_bytes: float
    model: AegaeonModel | None = None
    """The model that the worker holds or is loading."""
    since_s: float = 0.0
    ready_s: float = 0.0
    """The end of the load that is in progress; 0 if none is."""
    goal: AegaeonModel | None = None
    """The model to load once the last answers have ended."""
    cut_s: float = 0.0
    """The time at which the last answers are cut off before a switch."""
    steps_now: bool = False
    """True if a step of this worker is running."""
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
        """Return whether a request for its model can be given to this worker."""
        return self.model is not None and not self.ready_s and self.goal is None

    @property
    def is_busy(self) -> bool:
        """Return whether any request runs or is pending here."""
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

    def decide(self, now_s: float, lab: "ModelsLab") -> Sequence[tuple[GpuShare, AegaeonModel]]:
        """Return the workers that are to switch models now, with their new models."""


class ModelsLab:
    """The replay of one request log on a set of GPUs under one rule."""

    def __init__(
        self,
        models: Mapping[str, AegaeonModel],
        requests: Sequence[ServedRequest],
        places: Sequence[GpuShare],
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

    def _left(self, now_s: float, place: GpuShare) -> None:
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

    def _hand_back(self, now_s: float, place: GpuShare) -> None:
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

    def _loaded(self, now_s: float, place: GpuShare) -> None:
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

    def _step_ended(self, now_s: float, what: tuple[GpuShare, list[ServedRequest]]) -> None:
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


def cut(gpus: int, parts_bytes: Sequence[float]) -> list[GpuShare]:
    """Return the workers of `gpus` GPUs, each divided into `parts_bytes`."""
    numbers: Iterator[int] = count()
    return [GpuShare(next(numbers), gpu, part) for gpu in range(gpus) for part in parts_bytes]
