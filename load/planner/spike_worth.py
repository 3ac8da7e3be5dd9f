"""Which decisions of a planner on a live suite were useful: the same demand in the lab, with and without each."""

from collections.abc import Mapping
from typing import Any, Final

from libs.cli.planner.in_lab import standing_before
from libs.contracts.errors import InvalidRequest
from libs.contracts.roles import role_from_name
from libs.lab.counterfactual import Standing, counterfactual
from libs.lab.traces.request import Trace
from libs.policy.roles import Role
from load.planner.live_kinds import LiveKind

MOST_JUDGED: Final = 64
"""Decisions of a run that are judged, the first ones: each takes two runs of the lab."""
PRESSED: Final = frozenset(("prompts_press", "decodes_press"))
"""Reasons of decisions that are to make something better; one that gives budgets back after a calm is not."""


def judged(
    decisions: list[dict[str, Any]],
    workers: list[dict[str, Any]],
    *,
    trace: Trace,
    kind: LiveKind,
    start_unix_ns: int,
    most: int = MOST_JUDGED,
) -> dict[str, bool]:
    """By id, whether what the trace's requests met would have been worse without a decision, of those that answer
    pressure. `workers`: as they stood after all `decisions`."""
    experiment = kind.experiment(trace, len(workers))
    found: dict[str, bool] = {}
    for decision in [each for each in decisions if each["reason_code"] in PRESSED][:most]:
        standing = standing_before(decision, workers, decisions)
        names = sorted(standing)
        changes = {names.index(each["worker"]): _standing(each) for each in decision["changes"]}
        at_s = (decision["decided_unix_ns"] - start_unix_ns) / 1e9
        try:
            roles = [standing[name] for name in names]
            found[decision["id"]] = counterfactual(experiment, roles, changes, at_s).useful
        except InvalidRequest:
            continue  # nothing came after it
    return found


def _standing(change: Mapping[str, Any]) -> Standing:
    number, budget = role_from_name(change["role"], change["budget_tokens"])
    return Standing(Role(number), budget)
