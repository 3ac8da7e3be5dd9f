"""The work that pools can take while the SLO holds: a lab search by phase, and a check of both phases.

A queue finds the edge roughly, and the lab finds it for the smallest pool. To isolate one phase, the other one is
made free: prompts with almost no answer, or answers whose prompts take no time. The check runs both at their cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Final

import numpy as np

from libs.capacity.rough import answers_in_time, prompts_in_time
from libs.contracts.errors import InvalidRequest
from libs.lab.experiment import Experiment, LabReport, run
from libs.lab.hardware import Hardware
from libs.lab.policies import policy_named
from libs.lab.slo import SloSpec
from libs.lab.traces.draws import gamma_ns, log_normal_tokens
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.capacity import PHASES, Phase, PoolTable, WorkerKind, decode_seconds, make_table, prefill_seconds
from libs.policy.speed import Speed
from libs.policy.worker.saturation import knee_of

SIZES: Final = (1, 2, 4)
"""The sizes of pools that are measured, in workers."""
# The factor between rates during the search. The bracket is then halved `HALVINGS` times, to 7 %.
STEP: Final = 1.3
HALVINGS: Final = 2
NEAR_STEP: Final = 1.15
"""The factor used instead of `STEP` when a smaller pool has shown roughly where the edge is."""
# The edge of the queue is found to 2 %.
ROUGH_HALVINGS: Final = 4
ROUNDING: Final = 1.000001
MOST_STEPS: Final = 12
"""The most steps up or down from the first rate."""
MOST_REQUESTS: Final = 1000
LEAST_REQUESTS: Final = 300
LEAST_S: Final = 20.0
# A run lasts at least this many answers, so that a queue has time to grow.
STAYS: Final = 3.0
SPREAD: Final = 0.8
"""Standard deviation of the logarithms of lengths when only means are known."""
DRAWN: Final = 2000
MOST_CV: Final = 8.0
PREFILL_CHUNK: Final = 8192
NO_PACE_NS: Final = 1_000_000_000

Lengths = Sequence[tuple[int, int]]
"""Prompt and output tokens of requests, from which a run draws its lengths."""
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanTraffic:
    """The lengths and arrivals of a plan's requests."""

    lengths: Lengths
    cv: float
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""

    @property
    def prompt_tokens(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @property
    def output_tokens(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)

    def scaled(self, prompts: float, outputs: float) -> "PlanTraffic":
        """Return the traffic with all lengths multiplied by these factors."""
        lengths = [(max(round(p * prompts), 1), max(round(o * outputs), 1)) for p, o in self.lengths]
        return replace(self, lengths=lengths)


def made_lengths(prompt_tokens: float, output_tokens: float, seed: int = 1) -> Lengths:
    """Return log-normal lengths with these means, for when no single request is known."""
    rng = np.random.default_rng(seed)
    prompts = log_normal_tokens(rng, max(prompt_tokens, 1.0), SPREAD, DRAWN)
    outputs = log_normal_tokens(rng, max(output_tokens, 1.0), SPREAD, DRAWN)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def gap_cv(dispersion: float) -> float:
    """Return the coefficient of variation of a gamma process with this index of dispersion of counts, at least 1."""
    return min(max(sqrt(max(dispersion, 0.0)), 1.0), MOST_CV)


def worker_kind(hardware: Hardware, max_sequences: int) -> WorkerKind:
    found = hardware.profile

    chunk = hardware.chunk_tokens or knee_of(found.step_time, PREFILL_CHUNK)[0]
    tokens = found.kv_memory_bytes // max(found.kv_bytes_per_token, 1)
    return WorkerKind(Speed(found.step_time, chunk, measured=True), found.gpus, max_sequences, tokens)


@dataclass(frozen=True, slots=True)
class Bench:
    """The lab with one kind of worker, one SLO and one kind of traffic."""

    hardware: Hardware
    slo: SloSpec
    traffic: PlanTraffic
    max_sequences: int
    objective: float = 0.99
    """The share of requests that must keep the SLO."""
    seed: int = 1

    @property
    def kind(self) -> WorkerKind:
        """The kind of every worker in the bench's pools."""
        return worker_kind(self.hardware, self.max_sequences)

    def work_each(self) -> dict[Phase, float]:
        """Return the seconds that a request takes on one worker in each phase."""
        prompt, output = self.traffic.prompt_tokens, self.traffic.output_tokens
        return {
            "prefill": prefill_seconds(self.kind, prompt),
            "decode": decode_seconds(self.kind, prompt, output, self.slo.tpot_ns / 1e9),
        }

    def tables(self, note: Note = lambda line: None, sizes: Sequence[int] = SIZES) -> dict[Phase, PoolTable]:
        """Return the most work that pools of each phase can take.

        It is the edge of the queue in `libs.capacity.rough`, scaled by the lab's result for the smallest pool.
        Raise InvalidRequest if the SLO cannot be met at all.
        """
        found: dict[Phase, PoolTable] = {}
        seconds = {phase: self._seconds_each(phase) for phase in PHASES}
        for phase, each in seconds.items():
            rough = [(workers, self._rough_edge(phase, workers, workers / each)) for workers in sizes]
            at = next(((workers, rate) for workers, rate in rough if rate), None)
            if at is None:
                found[phase] = self.search_table(phase, note, sizes)
                continue
            true = edge(self._good(phase, at[0], note, at[0] / each), at[1], step=NEAR_STEP, halvings=1)
            found[phase] = make_table([(count, round(tried * true / at[1] * each, 6)) for count, tried in rough])
        return found

    def search_tables(self, note: Note = lambda line: None, sizes: Sequence[int] = SIZES) -> dict[Phase, PoolTable]:
        """Return the tables from the lab alone, which takes minutes; a reference for `tables`."""
        return {phase: self.search_table(phase, note, sizes) for phase in PHASES}

    def search_table(self, phase: Phase, note: Note, sizes: Sequence[int]) -> PoolTable:
        """Search the table of one phase by the lab alone."""
        measured: list[tuple[int, float]] = []
        for workers in sizes:
            # Each worker of a larger pool takes as much work or a little more.
            known = measured[-1][1] / measured[-1][0] if measured else 0.0
            measured.append((workers, self.most_work(phase, workers, known, note)))
        return make_table(measured)

    def most_work(self, phase: Phase, workers: int, known: float = 0.0, note: Note = lambda line: None) -> float:
        """Return the most work of a pool, in permanently busy workers.

        `known` is the work that each worker of a smaller pool can take; 0 if unknown.
        """
        each = self._seconds_each(phase)
        good = self._good(phase, workers, note)
        if known:
            return edge(good, known * workers / each, step=NEAR_STEP, halvings=1) * each
        return edge(good, 0.75 * workers / each) * each

    def _seconds_each(self, phase: Phase) -> float:
        each = self.work_each()[phase]
        if not 0 < each < float("inf"):
            raise InvalidRequest(f"SLO {self.slo.text!r} cannot be met: not one sequence decodes in time")
        return each

    def _good(self, phase: Phase, workers: int, note: Note, top: float = inf) -> Callable[[float], bool]:
        """Return a test of whether the lab keeps the objective at a rate; rates above `top` fail untried."""

        def good(rate: float) -> bool:
            if rate > top * ROUNDING:
                return False
            found = self.attempt(phase, workers, rate)
            note(f"{workers} {phase} workers at {rate:.2f} requests/s: {found:.1%} in time")
            return found >= self.objective

        return good

    def _rough_edge(self, phase: Phase, workers: int, top: float) -> float:
        """Return the highest rate, at most `top`, that the pool sustains as a queue; 0 if none was found."""
        high, rate = 0.0, top
        for _ in range(MOST_STEPS):
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
        """Return the share of requests in time for the same arrivals as `attempt`, with the pool as a queue."""
        trace, seconds = self._trace(self._lengths(phase), rate)
        kind = self.kind

        def limit_s(request: TraceRequest) -> float:
            return self.slo.ttft_limit_ns(kind.speed.prompt_ns(request.input_tokens, request.input_tokens**2)) / 1e9

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
        """Return the share of requests in time if the other phase is free."""
        model = self.hardware.profile.step_time
        if phase == "prefill":
            split = (workers, max(workers, 1))
        else:
            split = (max(workers // 2, 1), workers)
            model = replace(
                model,
                prefill_fixed_ns=0.0,
                prefill_token_ns=0.0,
                prefill_token_squared_ns=0.0,
                prefill_floor_ns=0.0,
            )
        hardware = replace(self.hardware, profile=replace(self.hardware.profile, step_time=model))
        # Answers of two tokens with a KV transfer between them could hardly keep a pace, so none is required.
        slo = replace(self.slo, tpot_ns=max(self.slo.tpot_ns, NO_PACE_NS)) if phase == "prefill" else self.slo
        return self._run(hardware, self._lengths(phase), rate, split, slo=slo).score.slo_attainment

    def check(self, rate: float, prefill: int, decode: int, most_s: float = inf) -> LabReport:
        """Run both phases at their cost on these workers, with arrivals for at most `most_s`."""
        return self._run(
            self.hardware, list(self.traffic.lengths), rate, (prefill, decode), slo=self.slo, most_s=most_s
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
            chunk_tokens=self.hardware.chunk_tokens or self.kind.speed.chunk_tokens,
            warm_up_s=self._warm_up_s(seconds, lengths),
            overtime_s=max(60.0, 4 * self._answer_s(lengths)),
        )
        return run(experiment, policy_named(f"fulcrum:{prefill}:{decode}", prefill + decode))[0]

    def _answer_s(self, lengths: Lengths) -> float:
        """Return the seconds of a mean answer at the slowest pace that is in time."""
        return self.traffic.output_tokens * self.slo.tpot_ns / 1e9 if lengths[0][1] > 2 else 1.0

    def _warm_up_s(self, seconds: float, lengths: Lengths) -> float:
        return min(seconds / 4, self._answer_s(lengths))

    def _trace(self, lengths: Lengths, rate: float, most_s: float = inf) -> tuple[Trace, float]:
        """Return (arrivals, their duration in seconds) for a rate."""
        stay_s = STAYS * self._answer_s(lengths)
        seconds = max(LEAST_S, stay_s, LEAST_REQUESTS / rate)
        if rate * seconds > MOST_REQUESTS:
            seconds = max(MOST_REQUESTS / rate, stay_s, 10.0)
        seconds = min(seconds, most_s)
        return made_trace(lengths, rate, self.traffic.cv, seconds, self.seed), seconds


def edge(good: Callable[[float], bool], start: float, step: float = STEP, halvings: int = HALVINGS) -> float:
    """Return the highest good rate, to 7 %; 0 if none lies within `MOST_STEPS` of `start`."""
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
    if not low:
        return 0.0
    if not high:
        return low
    for _ in range(halvings):
        middle = sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def made_trace(lengths: Lengths, rate: float, cv: float, seconds: float, seed: int) -> Trace:
    """Return gamma arrivals with lengths drawn from those given."""
    rng = np.random.default_rng([seed, 7])
    times = gamma_ns(rng, rate, cv, seconds)
    picked = rng.integers(0, len(lengths), len(times))
    requests = [
        TraceRequest(number, at_ns, *lengths[which])
        for number, (at_ns, which) in enumerate(zip(times.tolist(), picked.tolist(), strict=True))
    ]
    if not requests:
        requests = [TraceRequest(0, 0, *lengths[0])]
    return Trace("plan", requests)
