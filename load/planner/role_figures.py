"""What the figures of `bench_role` say: their spread, a table for people, and which of them break a promise. Pure."""

import statistics
from collections.abc import Sequence
from typing import Any

AIM_S = 0.1
"""Of a move's effect at p99: shown as met or missed, and never a fault, since a busy machine can miss it."""
MIN_CAUGHT = 0.5
"""Share of moves that must find running sequences: others show nothing of what a move costs them."""
MIN_LOAD = 0.7
"""Requests under way as a share of the decode slots at the start."""
SPREADS = {
    "idle p50/p99 ms": "effect_idle_ms",
    "loaded p50/p99 ms": "effect_loaded_ms",
    "less core waits": "effect_loaded_without_core_waits_ms",
    "first step p50/p99": "first_step_ms",
}


def spread_ms(seconds: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p99 and the greatest, in ms; null where nothing was measured. A move without effect counts as endless,
    which is null too."""
    values = sorted(float("inf") if value is None else value for value in seconds)
    if not values:
        return {"p50": None, "p99": None, "max": None}
    at = {"p50": statistics.median_low(values), "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1]}
    return {name: None if value == float("inf") else round(value * 1e3, 2) for name, value in at.items()}


def aim_met(spread: dict[str, float | None]) -> bool:
    """Whether a move's effect comes soon enough."""
    return spread["p99"] is not None and spread["p99"] < AIM_S * 1e3


def faults(figures: dict[str, Any]) -> list[str]:
    """What of an engine's figures breaks a promise, or makes them say too little, in words."""
    moves, behind = figures["moves"], figures["moves_with_gateways_behind"]
    found = [f"{figures[name]} requests {what}" for name, what in _ANSWERS.items() if figures[name]]
    if figures["caught_running"] < MIN_CAUGHT * moves:
        found.append(
            f"only {figures['caught_running']} of {moves} moves caught running sequences, {MIN_CAUGHT:.0%} must"
        )
    if behind:
        found.append(f"gateways stayed behind {behind} moves")
    if figures["slots_used"] < MIN_LOAD:
        found.append(f"the load was {figures['slots_used']:.0%} of the decode slots, less than {MIN_LOAD:.0%}")
    found += [
        f"{what} won {figures[name]} of {figures['rival_rounds']} rounds"
        for name, what in _RIVALS.items()
        if figures[name]
    ]
    return found


_ANSWERS = {"failed": "failed", "wrong": "were answered differently than without moves"}
_RIVALS = {"both_won": "both rivals", "none_won": "no rival"}


def table(results: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    head = (
        f"{'engine':<14}{'moves':>6}{'caught':>7}{'moved':>6}{'answers':>8}{'failed':>7}{'wrong':>6}{'rivals':>7}  "
        + "".join(f"{title:>20}" for title in SPREADS)
    )
    rows = [
        f"{r['engine']:<14}{r['moves']:>6}{r['caught_running']:>7}{r['sequences_moved']:>6}{r['answers']:>8}"
        f"{r['failed']:>7}{r['wrong']:>6}{r['rival_rounds']:>7}  "
        + "".join(f"{_ms(r[name]['p50']):>11} / {_ms(r[name]['p99']):<6}" for name in SPREADS.values())
        for r in results
    ]
    aims = [
        f"{r['engine']}: aim p99 < {AIM_S * 1e3:g} ms "
        + ", ".join(f"{name} {'met' if aim_met(r[f'effect_{name}_ms']) else 'missed'}" for name in ("idle", "loaded"))
        for r in results
    ]
    return "\n".join([head, *rows, *aims])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
