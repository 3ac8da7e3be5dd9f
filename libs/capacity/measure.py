"""The work that pools can do within the SLO, measured in the lab for each phase, and a check of both phases together.

A simple queue model finds the limit roughly, and the lab finds it for the smallest pool. The lab measures a phase while
the other one is free: requests have almost no output, or their prompts take no time. The check runs both phases at
their cost.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Final

from libs.capacity.traffic import Lengths, PlanTraffic, made_trace
from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment, LabReport, gpu_link_gbps, run
from libs.lab.hardware import Hardware
from libs.lab.policies import policy_named
from libs.lab.slo import SloSpec
from libs.lab.study import Note
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.capacity import PHASES, Phase, PoolTable, WorkerKind, decode_seconds, make_table, prefill_seconds
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.pace import IN_HAND
from libs.policy.worker.saturation import knee_of

# Prompts are served one after the other. Decoding sequences share their worker: between two events, all its sequences
# advance together. The number of tokens generated in a given time has a closed form, although the KV grows in that
# time.


LimitS = Callable[[TraceRequest], float]
"""A function that returns the time limit for a request's first token, in s."""


def prompts_in_time(requests: Sequence[TraceRequest], kind: WorkerKind, workers: int, limit_s: LimitS) -> list[bool]:
    """Return, for each request, whether its prompt is computed in time if decoding takes no time."""
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
    """Return, for each request, whether it is decoded in time if prompts take no time."""
    return _Pool(kind, workers, limit_s, tpot_s, [False] * len(requests)).run(requests)


@dataclass(slots=True)
class _QueueWorker:
    """One worker and the sequences that decode together on it."""

    model: StepTimeModel
    at_s: float = 0.0
    """The time up to which `tokens` and `kv` have been computed."""
    tokens: float = 0.0
    """The number of tokens that a sequence would have if it had run from the beginning."""
    kv: float = 0.0
    reserved: int = 0
    """The number of KV tokens that all running sequences will occupy at their ends."""
    running: list[tuple[float, int, TraceRequest, float]] = field(default_factory=list)
    """A heap of tuples: the value of `tokens` at the end, index, request, start time."""
    version: int = 0

    def step_s(self, more: int = 0, more_kv: float = 0.0) -> float:
        """Return the time of one step if `more` sequences were added."""
        count = len(self.running) + more
        own_ns = self.model.sequences_ns(count) + self.model.decode_kv_token_ns * (self.kv + more_kv)
        return (self.model.reading_ns(count) + own_ns) / 1e9

    def advance(self, now_s: float) -> None:
        """Advance all sequences to `now_s`.

        A token takes `step` seconds, plus `growth` for each token generated before it.
        """
        passed_s, self.at_s = now_s - self.at_s, now_s
        count = len(self.running)
        if not count or passed_s <= 0:
            return
        step, growth = self.step_s(), self.model.decode_kv_token_ns * count / 1e9
        made = 2 * passed_s / (step + sqrt(step * step + 2 * growth * passed_s))
        self.tokens += made
        self.kv += made * count

    def ends_s(self) -> float:
        """Return the time at which the first sequence ends."""
        left = max(self.running[0][0] - self.tokens, 0.0)
        growth = self.model.decode_kv_token_ns * len(self.running) / 1e9
        return self.at_s + left * (self.step_s() + growth * left / 2)


class _Pool:
    """A pool of workers with one queue."""

    def __init__(self, kind: WorkerKind, workers: int, limit_s: LimitS, tpot_s: float, good: list[bool]) -> None:
        self._kind = kind
        self._workers = [_QueueWorker(kind.speed.step_time) for _ in range(workers)]
        self._limit_s = limit_s
        self._tpot_s = tpot_s
        self._good = good
        self._waiting: deque[tuple[int, TraceRequest]] = deque()
        self._ends: list[tuple[float, int, int]] = []
        """A heap of tuples: end time, worker, and the worker's version for which the time is valid."""

    def run(self, requests: Sequence[TraceRequest]) -> list[bool]:
        """Run until all requests have ended. Return, for each, whether it met the limits of first token and pace."""
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

    def _has_room(self, worker: _QueueWorker, request: TraceRequest) -> bool:
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


SIZES: Final = (1, 2, 4)
"""The sizes of the pools that are measured, in workers."""
STEP: Final = 1.3
"""The factor of the first step of a search."""
NEAR_STEP: Final = 1.15
"""The factor of the first step if the approximate limit is known from a smaller pool."""
WIDEST_STEP: Final = 4.0
PRECISION: Final = 1.075
"""The factor to which a search determines the limit."""
# With this many halvings, the limit of the queue model is found to 2 %.
ROUGH_HALVINGS: Final = 4
ROUNDING: Final = 1.000001
MOST_ROUGH_STEPS: Final = 12
MOST_STEPS: Final = 8
"""The maximum number of steps from the first rate, up or down."""
MOST_REQUESTS: Final = 1000
LEAST_REQUESTS: Final = 300
LEAST_S: Final = 20.0
# The minimum length of a run as a multiple of an answer's time, so that a queue has time to grow.
STAYS: Final = 3.0
PREFILL_CHUNK: Final = 8192
NO_PACE_NS: Final = 1_000_000_000
# Faster than any link, but still a number that the lab accepts.
FREE_LINK_GBPS: Final = 1e6


def worker_kind(hardware: Hardware, max_sequences: int) -> WorkerKind:
    found = hardware.profile

    chunk = hardware.chunk_tokens or knee_of(found.step_time, PREFILL_CHUNK)[0]
    tokens = found.kv_memory_bytes // max(found.kv_bytes_per_token, 1)
    return WorkerKind(Speed(found.step_time, chunk, measured=True), found.gpus, max_sequences, tokens)


@dataclass(frozen=True, slots=True)
class Bench:
    """The lab for one kind of worker, one SLO and one kind of traffic."""

    hardware: Hardware
    slo: SloSpec
    traffic: PlanTraffic
    max_sequences: int
    objective: float = 0.99
    """The share of requests that must meet the SLO."""
    seed: int = 1
    encode_token_ns: float = 0.0
    """The mean time of encoding images, per prompt token."""

    @property
    def kind(self) -> WorkerKind:
        """The kind of all workers in the pools."""
        return replace(worker_kind(self.hardware, self.max_sequences), encode_token_ns=self.encode_token_ns)

    @property
    def lab_hardware(self) -> Hardware:
        """The hardware with which the lab runs.

        The lab's prompts have no images, so the time of encoding is added to each prompt token.
        """
        model = self.hardware.profile.step_time
        # The floor of a prompt's time includes no encoding, so it is raised by the encoding of a mean prompt below the
        # floor.
        short = [
            prompt for prompt, _ in self.traffic.lengths if model.chunks_ns(prompt, prompt**2) <= model.prefill_floor_ns
        ]
        model = replace(
            model,
            prefill_token_ns=model.prefill_token_ns + self.encode_token_ns,
            prefill_floor_ns=model.prefill_floor_ns + self.encode_token_ns * sum(short) / max(len(short), 1),
        )
        return _with_step_time(self.hardware, model)

    def work_each(self) -> dict[Phase, float]:
        """Return the seconds for which a request occupies one worker in each phase."""
        prompt, output = self.traffic.prompt_tokens, self.traffic.output_tokens
        return {
            "prefill": prefill_seconds(self.kind, prompt),
            "decode": decode_seconds(self.kind, prompt, output, self.slo.tpot_ns / 1e9),
        }

    def tables(self, note: Note = lambda line: None, sizes: Sequence[int] = SIZES) -> dict[Phase, PoolTable]:
        """Return, for each phase, a table of the maximum work of pools by size.

        It is the limit of the queue model, scaled by the lab's result for the smallest pool. Raise InvalidRequest if no
        rate meets the SLO.
        """
        found: dict[Phase, PoolTable] = {}
        seconds = {phase: self._seconds_each(phase) for phase in PHASES}
        for phase, each in seconds.items():
            rough = [(workers, self._rough_edge(phase, workers, workers / each)) for workers in sizes]
            at = next(((workers, rate) for workers, rate in rough if rate), None)
            if at is None:
                found[phase] = self.search_table(phase, note, sizes)
            else:
                true = edge(self._good(phase, at[0], note, at[0] / each), at[1], step=NEAR_STEP)
                found[phase] = make_table([(count, round(tried * true / at[1] * each, 6)) for count, tried in rough])
            if not found[phase].work[-1]:
                raise InvalidRequest(
                    f"SLO {self.slo.text!r} cannot be met: at no rate do {sizes[-1]} {phase} workers serve "
                    f"{self.objective:.0%} of these requests and their bursts in time; allow more time, or take a "
                    "faster device"
                )
        return found

    def search_table(self, phase: Phase, note: Note, sizes: Sequence[int]) -> PoolTable:
        """Measure the table of one phase with the lab alone."""
        measured: list[tuple[int, float]] = []
        for workers in sizes:
            # Per worker, a larger pool can do at least about as much work.
            known = measured[-1][1] / measured[-1][0] if measured else 0.0
            measured.append((workers, self.most_work(phase, workers, known, note)))
        return make_table(measured)

    def most_work(self, phase: Phase, workers: int, known: float = 0.0, note: Note = lambda line: None) -> float:
        """Return the maximum work of a pool, in permanently busy workers.

        `known` is the maximum work per worker of a smaller pool; 0 if unknown.
        """
        each = self._seconds_each(phase)
        good = self._good(phase, workers, note)
        if known:
            return edge(good, known * workers / each, step=NEAR_STEP) * each
        return edge(good, 0.75 * workers / each) * each

    def _seconds_each(self, phase: Phase) -> float:
        each = self.work_each()[phase]
        if not 0 < each < float("inf"):
            raise InvalidRequest(f"SLO {self.slo.text!r} cannot be met: {self._obstacle()}")
        return each

    def _obstacle(self) -> str:
        """Return the reason why a worker cannot decode even a single sequence in time."""
        kind, mean = self.kind, self.traffic.prompt_tokens + self.traffic.output_tokens
        if kind.kv_tokens and kind.kv_tokens < mean + 1:
            return f"a request has {mean:,.0f} tokens, and a worker's KV holds {kind.kv_tokens:,}; take a larger device"
        alone_ms = kind.speed.decode_ns(1, self.traffic.prompt_tokens + self.traffic.output_tokens / 2) / 1e6
        least_ms = ceil(alone_ms / (1 - IN_HAND))
        return (
            f"one sequence alone takes {alone_ms:.1f} ms a token;"
            f" set --slo with tpot={least_ms}ms or more, or plan for a faster device"
        )

    def _good(self, phase: Phase, workers: int, note: Note, top: float = inf) -> Callable[[float], bool]:
        """Return a function that tests whether the lab meets the objective at a rate.

        Rates above `top` fail without a run.
        """

        def good(rate: float) -> bool:
            if rate > top * ROUNDING:
                return False
            found = self.attempt(phase, workers, rate)
            note(f"{workers} {phase} workers at {rate:.2f} requests/s: {found:.1%} in time")
            return found >= self.objective

        return good

    def _rough_edge(self, phase: Phase, workers: int, top: float) -> float:
        """Return the highest rate, at most `top`, at which the queue model meets the objective; 0 if none was found."""
        high, rate = 0.0, top
        for _ in range(MOST_ROUGH_STEPS):
            if self.rough_attempt(phase, workers, rate) >= self.objective:
                break
            high, rate = rate, rate / STEP
        else:
            return 0.0
        for _ in range(ROUGH_HALVINGS if high else 0):
            middle = sqrt(rate * high)
            good = self.rough_attempt(phase, workers, middle) >= self.objective
            rate, high = (middle, high) if good else (rate, middle)
        return rate

    def rough_attempt(self, phase: Phase, workers: int, rate: float) -> float:
        """Return the share of requests in time by the queue model, for the same arrivals as in `attempt`."""
        trace, seconds = self._trace(self._lengths(phase), rate)
        kind = self.kind
        alone = replace(kind.speed, step_time=self.lab_hardware.profile.step_time)

        def limit_s(request: TraceRequest) -> float:
            return self.slo.ttft_limit_ns(alone.prompt_ns(request.input_tokens, request.input_tokens**2)) / 1e9

        if phase == "prefill":
            good = prompts_in_time(trace.requests, kind, workers, limit_s)
        else:
            good = answers_in_time(trace.requests, kind, workers, limit_s, self.slo.tpot_ns / 1e9)
        first_ns = trace.requests[0].arrival_ns + self._warm_up_s(seconds, self._lengths(phase)) * 1e9
        counted = [one for one, each in zip(good, trace.requests, strict=True) if each.arrival_ns >= first_ns]
        return sum(counted) / max(len(counted), 1)

    def _lengths(self, phase: Phase) -> Lengths:
        return [(prompt, 2) for prompt, _ in self.traffic.lengths] if phase == "prefill" else self.traffic.lengths

    def attempt(self, phase: Phase, workers: int, rate: float) -> float:
        """Return the share of requests that are in time in the lab if the other phase is free."""
        if phase == "prefill":
            split, hardware = (workers, max(workers, 1)), self.lab_hardware
        else:
            split, hardware = (max(workers // 2, 1), workers), self._with_free_prompts()
        # With two output tokens and a KV transfer between them, the pace would measure the transfer, so none is
        # required.
        slo = replace(self.slo, tpot_ns=max(self.slo.tpot_ns, NO_PACE_NS)) if phase == "prefill" else self.slo
        report = self._run(hardware, self._lengths(phase), rate, split, slo=slo, give_up_below=self.objective)
        return report.score.slo_attainment

    def _with_free_prompts(self) -> Hardware:
        """Return hardware on which prompts take no time.

        KV transfers take the time by which the link is slower than prefill, because KV is sent while its prompt is
        computed. With the full time of transfers, a burst of free prompts would saturate the link, which real prefill
        workers never do.
        """
        profile, model = self.hardware.profile, self.lab_hardware.profile.step_time
        token_bits = profile.kv_bytes_per_token * 8
        slower_ns = token_bits / (gpu_link_gbps(self.hardware) * profile.gpus) - model.prefill_token_ns
        token_ns = max(slower_ns, token_bits / FREE_LINK_GBPS)
        model = replace(
            model,
            prefill_fixed_ns=0.0,
            prefill_token_ns=0.0,
            prefill_token_squared_ns=0.0,
            prefill_floor_ns=0.0,
        )
        return replace(_with_step_time(self.hardware, model), link_gbps=token_bits / token_ns)

    def check(self, rate: float, prefill: int, decode: int, most_s: float = inf) -> LabReport:
        """Run both phases at their cost on these workers, with arrivals for at most `most_s`."""
        return self._run(
            self.lab_hardware, list(self.traffic.lengths), rate, (prefill, decode), slo=self.slo, most_s=most_s
        )

    def _run(
        self,
        hardware: Hardware,
        lengths: Lengths,
        rate: float,
        split: tuple[int, int],
        *,
        slo: SloSpec,
        most_s: float = inf,
        give_up_below: float = 0.0,
    ) -> LabReport:
        trace, seconds = self._trace(lengths, rate, most_s)
        prefill, decode = split
        experiment = Experiment(
            trace=trace,
            hardware=hardware,
            workers=prefill + decode,
            slo=slo,
            seed=self.seed,
            max_sequences=self.max_sequences,
            # The time limits include the cost of prompts, even if prompts are free in the run.
            limit_step_time=self.lab_hardware.profile.step_time,
            chunk_tokens=self.hardware.chunk_tokens or self.kind.speed.chunk_tokens,
            warm_up_s=self._warm_up_s(seconds, lengths),
            overtime_s=max(60.0, 4 * self._answer_s(lengths)),
            give_up_below=give_up_below,
            link_gbps=gpu_link_gbps(hardware),
        )
        return run(experiment, policy_named(f"fulcrum:{prefill}:{decode}", prefill + decode))[0]

    def _answer_s(self, lengths: Lengths) -> float:
        """Return the seconds of a mean answer at the slowest pace that meets the SLO."""
        return self.traffic.output_tokens * self.slo.tpot_ns / 1e9 if lengths[0][1] > 2 else 1.0

    def _warm_up_s(self, seconds: float, lengths: Lengths) -> float:
        return min(seconds / 4, self._answer_s(lengths))

    def _trace(self, lengths: Lengths, rate: float, most_s: float = inf) -> tuple[Trace, float]:
        """Return a trace for a rate, and its duration in s."""
        stay_s = STAYS * self._answer_s(lengths)
        seconds = max(LEAST_S, stay_s, LEAST_REQUESTS / rate)
        if rate * seconds > MOST_REQUESTS:
            seconds = max(MOST_REQUESTS / rate, stay_s, 10.0)
        seconds = min(seconds, most_s)
        return made_trace(lengths, rate, self.traffic.cv, seconds, self.seed), seconds


def _with_step_time(hardware: Hardware, model: StepTimeModel) -> Hardware:
    return replace(hardware, profile=replace(hardware.profile, step_time=model))


def edge(good: Callable[[float], bool], start: float, step: float = STEP) -> float:
    """Return the highest rate that is `good`, within a factor of `PRECISION`. Return 0 if no good rate was found.

    The step size is squared after each step, so that a bad start costs few attempts. At most `MOST_STEPS` steps are
    made from `start`.
    """
    low, high, rate = 0.0, 0.0, start
    for _ in range(MOST_STEPS):
        if good(rate):
            low = rate
            if high:
                break
            rate *= step
        else:
            high = rate
            if low:
                break
            rate /= step
        step = min(step * step, WIDEST_STEP)
    if not (low and high):
        return low
    while high > low * PRECISION:
        middle = sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
