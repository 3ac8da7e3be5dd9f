"""Two runs of one trace side by side: each request's times in both, how far they differ, and the cases compared."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import Hardware
from libs.lab.policies import Policy
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace
from libs.perfmodel.profiles import Profile, profile
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from load.measure import rounded

# A gateway's own defaults, so that requests need name none.
SLO: Final = "ttft=5s,tpot=100ms"
# Hops of a first token: to the prefill worker and back.
HOPS: Final = 2
# Hops between the first token and the second: to the decode worker and back.
HAND_OVER_HOPS: Final = 2
LEAST_HOP_MS: Final = 0.05
CALIBRATIONS: Final = 6
# Share of a found hop that one calibration takes up. A hop decides which step a sequence joins, so that the second
# token moves by more than the hop does, and full corrections oscillate.
DAMPING: Final = 0.4
# More than a trace has requests.
POOL: Final = 10_000_000
# A simulated clock counts seconds as a float, and its rounding adds up over the steps of an answer.
SAME_NS: Final = 1_000.0
# Aims: shares of the live figure, or a multiple of the difference between two live runs where that is more.
TTFT_MEAN, TPOT_MEAN, P99, TIMES_SPREAD = 0.04, 0.01, 0.10, 1.5
# Token ids of prompts are drawn below this: the built-in vocabulary's bytes.
BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of one request in one run."""

    arrival_ns: int
    ttft_ns: float
    """The nanoseconds since the arrival at the gateway."""
    tpot_ns: float
    """0 if the answer had one token."""
    prefill_worker: str
    decode_worker: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    served: Mapping[int, Served]
    """The requests that did not fail, by number."""
    preemptions: int
    client_ttft_ns: Mapping[int, float] | None = None
    """The nanoseconds from sending to the first piece of the answer, by number; None if no client measured them."""
    latest_ns: float = 0.0
    """The largest delay in ns of the client when sending a request."""
    learned: StepTimeModel | None = None
    """The step times that its workers had learned by its end."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    profile: Profile
    roles: Sequence[tuple[Role, int]]
    """(role, prompt budget) of each worker, w0 first."""
    chunk_tokens: int
    max_sequences: int
    link_gbps: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Properties of a suite's machine that the lab cannot derive."""

    hop_ms: float
    lookup_ms: float = 0.0
    """The time from a request's arrival to the answer of the block index."""
    step_ms: float = 0.0
    """The excess of a step over the engine alone, by the worker's own CPU time."""
    gateway_ms: float = 0.0
    """The gateway's share of a first token's time, beside its look-up."""


def lab_replay(place: ClusterShape, trace: Trace, constants: Constants) -> Replay:
    hop_ms, more_ns = constants.hop_ms, constants.step_ms * 1e6
    steps = place.profile.step_time
    steps = replace(
        steps, decode_fixed_ns=steps.decode_fixed_ns + more_ns, prefill_fixed_ns=steps.prefill_fixed_ns + more_ns
    )
    experiment = Experiment(
        trace=trace,
        hardware=Hardware(replace(place.profile, step_time=steps), mixed_measured=True),
        workers=len(place.roles),
        slo=parse_slo(SLO),
        hop_ms=hop_ms,
        lookup_ms=constants.lookup_ms,
        link_gbps=place.link_gbps / place.profile.gpus,  # of one GPU in the lab, of the whole worker here
        chunk_tokens=place.chunk_tokens,
        max_sequences=place.max_sequences,
    )
    policy = Policy("fulcrum", lambda _: list(place.roles))
    _, result = run(experiment, policy)
    served = {
        answer.request.number: Served(
            answer.request.arrival_ns,
            answer.ttft_ns + constants.gateway_ms * 1e6,
            answer.tpot_ns,
            answer.prefill_worker,
            answer.decode_worker,
            answer.cached_tokens,
        )
        for answer in result.answers
        if answer.outcome is LabOutcome.COMPLETED
    }
    return Replay(served, sum(worker.load().preemptions for worker in result.workers))


def calibrate(place: ClusterShape, trace: Trace, truth: Replay, constants: Constants) -> Constants:
    """Return constants with which a typical request takes as long in the lab as it did.

    Uses medians of the differences of each request's own times: a mean depends on queues, and queues on the order
    of arrivals. The difference in decoding grows with the tokens, by a step's share, on top of the hops of one
    hand-over.
    """
    came = as_it_came(trace, truth)
    later = {each.number: each.output_tokens - 1 for each in came.requests}
    for _ in range(CALIBRATIONS):
        lab = lab_replay(place, came, constants)
        pairs = [(later[number], truth.served[number], other) for number, other in lab.served.items()]
        ttft_ms = float(np.median([one.ttft_ns - other.ttft_ns for _, one, other in pairs])) / 1e6
        decode_ms = [(tokens, tokens * (one.tpot_ns - other.tpot_ns) / 1e6) for tokens, one, other in pairs if tokens]
        once_ms, step_ms = line(decode_ms)
        hop_ms = max(constants.hop_ms + DAMPING * once_ms / HAND_OVER_HOPS, LEAST_HOP_MS)
        more_ms = hop_ms - constants.hop_ms
        constants = replace(
            constants,
            hop_ms=hop_ms,
            step_ms=constants.step_ms + step_ms,
            gateway_ms=constants.gateway_ms + ttft_ms - HOPS * more_ms,
        )
    return constants


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (intercept, slope) of the line through the medians of the lower and the upper half of points (x, y)."""
    middle = float(np.median([x for x, _ in points]))
    halves = [[each for each in points if each[0] <= middle], [each for each in points if each[0] > middle]]
    if not halves[1]:  # all at one x: slope and offset cannot be separated
        return 0.0, float(np.median([y / x for x, y in points]))
    (low_x, low_y), (high_x, high_y) = (
        (float(np.median([x for x, _ in half])), float(np.median([y for _, y in half]))) for half in halves
    )
    slope = (high_y - low_y) / (high_x - low_x)
    return low_y - slope * low_x, slope


def pooled(replays: Sequence[Replay]) -> Replay:
    """Join the replays of several traces; requests get numbers of their own."""
    served = {
        place * POOL + number: each for place, replay in enumerate(replays) for number, each in replay.served.items()
    }
    return Replay(served, sum(replay.preemptions for replay in replays))


def as_it_came(trace: Trace, replay: Replay) -> Trace:
    """Return the trace with the arrivals that a replay really had, without the requests that failed there."""
    first_ns = min(each.arrival_ns for each in replay.served.values())
    requests = [
        replace(each, arrival_ns=replay.served[each.number].arrival_ns - first_ns)
        for each in trace.requests
        if each.number in replay.served
    ]
    return replace(trace, requests=tuple(sorted(requests, key=lambda each: each.arrival_ns)))


def prompt_ids(trace: Trace, *, seed: int = 2) -> list[list[int]]:
    """Return the token ids of each prompt: equal hash ids give equal blocks. A prompt without hash ids shares nothing,
    nor do prompts of different seeds.
    """
    blocks: dict[int, list[int]] = {}
    prompts = []
    for request in trace.requests:
        ids: list[int] = []
        for hash_id in request.hash_ids:
            if hash_id not in blocks:
                random = np.random.default_rng([1, hash_id])
                blocks[hash_id] = random.integers(0, BYTES, trace.block_tokens).tolist()
            ids += blocks[hash_id]
        missing = request.input_tokens - len(ids)
        if missing > 0:
            ids += np.random.default_rng([seed, request.number]).integers(0, BYTES, missing).tolist()
        prompts.append(ids[: request.input_tokens])
    return prompts


@dataclass(frozen=True, slots=True)
class Figures:
    """One time (TTFT or TPOT) over all requests of two runs; differences are the second run's from the first one's."""

    first_ms: Mapping[str, float]
    second_ms: Mapping[str, float]
    difference: Mapping[str, float]
    """Differences as shares of the first run's values."""
    typical_gap_ms: float
    """Median difference of a request's own two times."""
    p99_gap_ms: float
    mean_gap_ms: float
    """Mean difference of a request's two times, with its sign."""


@dataclass(frozen=True, slots=True)
class Comparison:
    case: str
    requests: int
    failed: int
    ttft: Figures
    tpot: Figures
    same_prefill: float
    """The share of requests whose prompt was computed at the same worker."""
    same_decode: float
    same_times: float
    """The share of requests whose TTFT and TPOT differ by less than `SAME_NS`."""
    cached_tokens: tuple[int, int]
    preemptions: tuple[int, int]

    def as_json(self) -> dict[str, Any]:
        return dict(rounded(asdict(self), 5))


def compare(case: str, first: Replay, second: Replay, requested: int) -> Comparison:
    """Compare two runs, of which `first` is the truth; `requested` is the number of the trace's requests."""
    both = sorted(first.served.keys() & second.served.keys())
    pairs = [(first.served[number], second.served[number]) for number in both]
    later = [(one, other) for one, other in pairs if one.tpot_ns and other.tpot_ns]
    return Comparison(
        case=case,
        requests=len(both),
        failed=requested - len(both),
        ttft=_figures([one.ttft_ns for one, _ in pairs], [other.ttft_ns for _, other in pairs]),
        tpot=_figures([one.tpot_ns for one, _ in later], [other.tpot_ns for _, other in later]),
        same_prefill=_share(pairs, lambda each: each.prefill_worker),
        same_decode=_share(later, lambda each: each.decode_worker),
        same_times=sum(map(_same_times, pairs)) / max(len(pairs), 1),
        cached_tokens=(sum(one.cached_tokens for one, _ in pairs), sum(other.cached_tokens for _, other in pairs)),
        preemptions=(first.preemptions, second.preemptions),
    )


def _same_times(pair: tuple[Served, Served]) -> bool:
    one, other = pair
    return abs(one.ttft_ns - other.ttft_ns) < SAME_NS and abs(one.tpot_ns - other.tpot_ns) < SAME_NS


def _share(pairs: Sequence[tuple[Served, Served]], of: Callable[[Served], str]) -> float:
    return sum(of(one) == of(other) for one, other in pairs) / max(len(pairs), 1)


def _figures(first: Sequence[float], second: Sequence[float]) -> Figures:
    one, other = np.array(first) / 1e6, np.array(second) / 1e6
    gaps = other - one
    first_ms, second_ms = _summary(one), _summary(other)
    difference = {name: second_ms[name] / first_ms[name] - 1 for name in first_ms}
    size = np.abs(gaps)
    return Figures(
        first_ms,
        second_ms,
        difference,
        float(np.median(size)),
        float(np.quantile(size, 0.99)),
        float(gaps.mean()),
    )


def _summary(times_ms: Any) -> dict[str, float]:
    p50, p99 = np.quantile(times_ms, [0.5, 0.99])
    return {"mean": float(times_ms.mean()), "p50": float(p50), "p99": float(p99)}


def verdict(lab: Comparison, spread: Sequence[Comparison]) -> dict[str, Any]:
    """Return the lab's errors and the allowed ones; `spread` compares live runs with each other."""
    aims = {("ttft", "mean"): TTFT_MEAN, ("ttft", "p99"): P99, ("tpot", "mean"): TPOT_MEAN, ("tpot", "p99"): P99}
    found = {}
    for (time_name, of), aim in aims.items():
        off = getattr(lab, time_name).difference[of]
        apart = max((abs(getattr(each, time_name).difference[of]) for each in spread), default=0.0)
        allowed = max(aim, TIMES_SPREAD * apart)
        found[f"{time_name} {of}"] = {"off": off, "aim": aim, "allowed": allowed, "met": abs(off) <= allowed}
    return found


def table(rows: Sequence[Comparison], first: str, second: str) -> str:
    lines = [
        f"| case | requests | | {first}: mean, p50, p99 ms | {second} | difference | a request's own, median, p99 ms"
        " | same prefill, decode, times | cached tokens | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, each in (("TTFT", row.ttft), ("TPOT", row.tpot)):
            digits = 1 if name == "TTFT" else 3
            of_row = name == "TTFT"
            lines.append(
                f"| {row.case if of_row else ''} | {_count(row) if of_row else ''} | {name}"
                f" | {_three(each.first_ms, digits)} | {_three(each.second_ms, digits)}"
                f" | {', '.join(f'{value:+.2%}' for value in each.difference.values())}"
                f" | {each.typical_gap_ms:.3f}, {each.p99_gap_ms:.3f}"
                f" | {f'{row.same_prefill:.1%}, {row.same_decode:.1%}, {row.same_times:.1%}' if of_row else ''}"
                f" | {'{} / {}'.format(*row.cached_tokens) if of_row else ''}"
                f" | {'{} / {}'.format(*row.preemptions) if of_row else ''} |"
            )
    return "\n".join(lines)


def _count(row: Comparison) -> str:
    return f"{row.requests}" + (f" ({row.failed} not in both)" if row.failed else "")


def _three(values: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values.values())


MIB: Final = 2**20
PREFILL, DECODE = (Role.PREFILL, 0), (Role.MIXED, 0)
LLAMA_70B, LLAMA_8B, SMOLLM2 = "llama-70b-tp4-h100", "llama-8b-h100", "smollm2-135m-cpu"
TWO_AND_TWO: Final = (PREFILL, PREFILL, DECODE, DECODE)
# The share of the built-in model's context that prompts may take.
MOST_PROMPT: Final = 7_000
WARM_UP: Final = "poisson:rate=4,isl=500,osl=20,seconds=8"


@dataclass(frozen=True, slots=True)
class Case:
    trace: str
    profile: str
    roles: Sequence[tuple[Role, int]]
    chunk_tokens: int = 2048
    max_sequences: int = 64
    link_gbps: float = 100.0
    kv_mib: int = 0
    """KV memory of a worker; 0 takes the profile's."""

    def place(self) -> ClusterShape:
        """Return the cluster with KV memory in whole MiB, as the sim engine's setting has it."""
        found: Profile = profile(self.profile)
        memory = (self.kv_mib or found.kv_memory_bytes // MIB) * MIB
        return ClusterShape(
            replace(found, kv_memory_bytes=memory), self.roles, self.chunk_tokens, self.max_sequences, self.link_gbps
        )


# Two prefill workers compute so many prompts of 1,500 tokens in the mean, at 120.8 ms each, which bounds that
# cluster.
CAPACITY_RPS: Final = 16.55
SIM_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "1p1d": Case("poisson:rate=5,isl=1500,osl=100,seconds=80", LLAMA_70B, [PREFILL, DECODE]),
        "1p1d-full": Case("poisson:rate=8,isl=1500,osl=100,seconds=40", LLAMA_70B, [PREFILL, DECODE]),
        "2p2d-half": Case(f"poisson:rate={0.5 * CAPACITY_RPS:.2f},isl=1500,osl=100,seconds=60", LLAMA_70B, TWO_AND_TWO),
        "2p2d-nine-tenths": Case(
            f"poisson:rate={0.9 * CAPACITY_RPS:.2f},isl=1500,osl=100,seconds=40", LLAMA_70B, TWO_AND_TWO
        ),
        "2p2d-bursts": Case("gamma:rate=10,cv=2,isl=1500,osl=100,seconds=50", LLAMA_70B, TWO_AND_TWO),
        "2p2d-flipflop": Case("flipflop:rate=6,isl=2000,osl=120,seconds=60", LLAMA_70B, TWO_AND_TWO),
        "2p2d-little-kv": Case("poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, TWO_AND_TWO, kv_mib=4500),
        "2p2d-few-places": Case("poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, TWO_AND_TWO, max_sequences=10),
        "mixed": Case("poisson:rate=2,isl=1000,osl=100,seconds=150", LLAMA_70B, [(Role.MIXED, 512)]),
        "2p2d-chats": Case("poisson:rate=8,isl=500,osl=80,seconds=50,sessions=40", LLAMA_70B, TWO_AND_TWO),
        "2p2d-mooncake": Case("mooncake_conversation.jsonl@600+300", LLAMA_8B, TWO_AND_TWO),
    }
)


@dataclass(frozen=True, slots=True)
class Live:
    """A case on a suite of processes."""

    case: Case
    """The case; its trace lacks length and seed."""
    arguments: Sequence[str]
    real: bool = False
    """True if the engine computes. The step times are then the ones learned by workers in the calibration run."""


LIVE: Final[Mapping[str, Live]] = MappingProxyType(
    {
        "live": Live(
            Case("poisson:rate=30,isl=300,osl=12", LLAMA_8B, TWO_AND_TWO),
            ("--engine", "sim", "--prefill", "2", "--decode", "2"),
        ),
        "live-long": Live(
            Case("poisson:rate=8,isl=2000,osl=60", LLAMA_70B, TWO_AND_TWO),
            ("--engine", "sim", "--prefill", "2", "--decode", "2"),
        ),
        "torch": Live(
            Case(
                "poisson:rate=0.6,isl=120,osl=24",
                SMOLLM2,
                [PREFILL, DECODE],
                chunk_tokens=512,
                max_sequences=16,
                link_gbps=50.0,
                kv_mib=512,
            ),
            ("--engine", "torch", "--prefill", "1", "--decode", "1"),
            real=True,
        ),
    }
)


def is_there(text: str) -> bool:
    """Return whether a trace is generated or its file is in FULCRUM_DATA."""
    name, cut, _ = text.partition("@")
    return not cut or (Path(os.environ.get("FULCRUM_DATA", "")) / name).is_file()


def trace_of(text: str, *, seed: int = 1, later_s: float = 0.0) -> Trace:
    """Return a generated trace, or NAME@START+SECONDS of a file in FULCRUM_DATA, begun `later_s` later."""
    name, cut, part = text.partition("@")
    if not cut:
        return generate(text, seed=seed)
    start_s, seconds = map(float, part.split("+"))
    return read_trace(Path(os.environ["FULCRUM_DATA"]) / name, seed=seed, start_s=start_s + later_s, seconds=seconds)


def live_trace(live: Live, seconds: float, seed: int) -> Trace:
    """Return a trace that a suite can serve."""
    return short(generate(f"{live.case.trace},seconds={seconds:g}", seed=seed))


def short(trace: Trace) -> Trace:
    """Return the trace with prompts that fit the context, and two tokens or more to each answer, so that all are
    handed over.
    """
    requests = [
        replace(each, input_tokens=min(each.input_tokens, MOST_PROMPT), output_tokens=max(each.output_tokens, 2))
        for each in trace.requests
    ]
    return replace(trace, requests=tuple(requests))
