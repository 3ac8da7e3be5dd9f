"""Figures of a GPU machine beside the lab's, and what each deviation means. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from load.gpu.against_profile import kind_of

Row = dict[str, Any]

# Measured over expected, from and to. vLLM runs without its compiler here, and the profile is of one with it. The p99
# of a minute is a handful of requests, among them the first, which compile kernels and connect to their peers.
P50_BAND: Final = (0.75, 1.35)
P99_BAND: Final = (0.5, 2.5)
STEP_BAND: Final = (0.9, 1.2)
MOVE_MS: Final = 50.0
LATE_MS: Final = 50.0
# Beginnings of the names of times.
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
STEPS: Final = {
    "prefill": "prefill leaves the profile: another attention backend or clock; all TTFTs below are off by as much",
    "decode": "decode leaves the profile: no CUDA graph, or another backend; all TPOTs below are off by as much",
    "mixed": "small prompts leave the graph: use the profile with `-eager`, or the compiler",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure beside the expected one."""

    what: str
    found: float | None
    expected: float | None
    ok: bool
    means: str = ""
    """The likely cause if the figure is off."""


def judge_serving(figures: Mapping[str, Any], hoped: Mapping[str, Any], *, moves: int = 0) -> list[Verdict]:
    """Return verdicts on the figures of `load.gpu.serve` beside the lab's."""
    answered, requested = figures.get("answered", 0), figures.get("requests", 0)
    found = [
        Verdict("answered", answered, requested, answered == requested and requested > 0,
                "requests failed: their errors are in `failed`, the workers' in `logs`")
    ]  # fmt: skip
    late_ms = figures.get("client_late_ms", 0.0)
    if late_ms > LATE_MS:
        means = "the client sent late, so its figures are worth little: give it free cores"
        found.append(Verdict("client_late_ms", round(late_ms, 1), LATE_MS, ok=False, means=means))
    for time, digits in (("ttft_ms", 0), ("tpot_ms", 1)):
        for of, band in (("p50", P50_BAND), ("p99", P99_BAND)):
            ours, labs = (figures.get(time) or {}).get(of), (hoped.get(time) or {}).get(of)
            if ours is None or not labs:
                continue
            ratio = ours / labs
            means = "" if band[0] <= ratio <= band[1] else SLOWER[f"{time} {of}"] if ratio > 1 else FASTER
            found.append(Verdict(f"{time} {of}", round(ours, digits), round(labs, digits), not means, means))
    if moves:
        held, effect = figures.get("moves", 0), (figures.get("move_effect_ms") or {}).get("p50")
        ok = held == moves and effect is not None and effect <= MOVE_MS
        means = "" if ok else "moves were refused or wait for a step: `moves_ended_by` and the planner's log say why"
        found.append(Verdict("move_effect_ms p50", effect, MOVE_MS, ok, means))
    return found


def judge_steps(rows: Sequence[Row]) -> list[Verdict]:
    """Return a verdict on each kind of step: the median of measured over predicted, of rows of `against_profile`."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row["ratio"])
    if not kinds:
        return [
            Verdict("steps", None, None, ok=False, means="no profile of this GPU: the lab's figures are of another")
        ]
    found = []
    for kind, ratios in kinds.items():
        ratio = statistics.median(ratios)
        ok = STEP_BAND[0] <= ratio <= STEP_BAND[1]
        found.append(Verdict(f"{kind}, over the profile's", round(ratio, 2), 1.0, ok, "" if ok else STEPS[kind]))
    return found
