"""The comparison of a GPU machine's figures with the lab's. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from load.gpu.against_profile import kind_of

Row = dict[str, Any]

# Bands (from, to) of the ratio of measured to expected time. vLLM runs here without its compiler, but the profile was
# measured with it. The p99 of a minute is that of a few requests, which include the first ones. Those compile kernels
# and connect workers.
P50_BAND: Final = (0.75, 1.35)
P99_BAND: Final = (0.5, 2.5)
STEP_BAND: Final = (0.9, 1.2)
MOVE_MS: Final = 50.0
LATE_MS: Final = 50.0
# The prefixes of the names of times.
TIMED: Final = ("ttft_ms", "tpot_ms", "client_late_ms", "move_effect_ms")

SLOWER: Final = {
    "ttft_ms p50": "if TPOT fits, KV goes by TCP or gateways lack cores: see GB/s in `fulcrum status --links`, and"
    " UCX_LOG_LEVEL=info for cuda_ipc; if TPOT is off too, see line steps",
    "ttft_ms p99": "first requests compile and connect: run the line again with --again; if it stays, a prefill worker"
    " queues longer than the lab's, so look at its share in `fulcrum top`",
    "tpot_ms p50": "decode steps are slower than the profile, or the gateway's core is full: see line steps, then the"
    " gateway's CPU; take a profile of this machine with `fulcrum lab calibrate`",
    "tpot_ms p99": "prompts run beside decodes: a worker changed its role, or KV arrives in bursts; see KV wait in"
    " `fulcrum top`",
}
FASTER: Final = (
    "faster than the profile: take a profile of this machine with `fulcrum lab calibrate` before a capacity plan"
)
MISSING: Final = "no answer has this time, here or in the lab, so it cannot be judged"
STEPS: Final = {
    "prefill": "prefill leaves the profile: another attention backend or clock; all TTFTs below are off by as much",
    "decode": "decode leaves the profile: no CUDA graph, or another backend; all TPOTs below are off by as much",
    "mixed": "small prompts leave the graph: use the profile with `-eager`, or the compiler",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The comparison of one figure with the expected value."""

    what: str
    found: float | None
    expected: float | None
    ok: bool
    means: str = ""
    """The likely cause if the figure is outside its band; empty if it is inside."""


def judge_serving(figures: Mapping[str, Any], lab: Mapping[str, Any]) -> list[Judgement]:
    """Compare the figures of `load.gpu.serve` with the lab's."""
    found = [judge_answers("answered", figures)]
    late_ms = figures.get("client_late_ms", 0.0)
    if late_ms > LATE_MS:
        means = "the client sent late, so its figures are worth little: give it free cores"
        found.append(Judgement("client_late_ms", round(late_ms, 1), LATE_MS, ok=False, means=means))
    for time, digits in (("ttft_ms", 0), ("tpot_ms", 1)):
        for of, band in (("p50", P50_BAND), ("p99", P99_BAND)):
            ours, theirs = (figures.get(time) or {}).get(of), (lab.get(time) or {}).get(of)
            if ours is None or not theirs:
                found.append(Judgement(f"{time} {of}", ours, theirs, ok=False, means=MISSING))
                continue
            ratio = ours / theirs
            means = "" if band[0] <= ratio <= band[1] else SLOWER[f"{time} {of}"] if ratio > 1 else FASTER
            found.append(Judgement(f"{time} {of}", round(ours, digits), round(theirs, digits), not means, means))
    return found


def judge_moves(figures: Mapping[str, Any], moves: int) -> list[Judgement]:
    """Judge the figures of requests that arrived while workers made `moves` role moves.

    Their latencies are not judged, because the lab's workers keep their roles.
    """
    held, effect = figures.get("moves", 0), (figures.get("move_effect_ms") or {}).get("p50")
    ok = held == moves and effect is not None and effect <= MOVE_MS
    means = "" if ok else "moves were refused or wait for a step: see `moves_ended_by` and the planner's log"
    return [
        judge_answers("answered while roles move", figures),
        Judgement("move_effect_ms p50", effect, MOVE_MS, ok, means),
    ]


def judge_answers(what: str, figures: Mapping[str, Any]) -> Judgement:
    answered, requested = figures.get("answered", 0), figures.get("requests", 0)
    means = "requests failed: their errors are in `failed`, the workers' in `logs`"
    return Judgement(what, answered, requested, answered == requested and requested > 0, means)


def judge_steps(rows: Sequence[Row]) -> list[Judgement]:
    """Judge each kind of step by the median ratio in rows of `against_profile`."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row["ratio"])
    if not kinds:
        return [
            Judgement("steps", None, None, ok=False, means="no profile of this GPU: the lab's figures are of another")
        ]
    found = []
    for kind, ratios in kinds.items():
        ratio = statistics.median(ratios)
        ok = STEP_BAND[0] <= ratio <= STEP_BAND[1]
        found.append(Judgement(f"{kind}, over the profile's", round(ratio, 2), 1.0, ok, "" if ok else STEPS[kind]))
    return found
