"""A model's assessment: the pressures, the missing workers and the advice that every view of the model shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from libs.policy.pressure import Split, WorkerProfile, Workload, split
from libs.policy.verdict.advice import Action
from libs.policy.verdict.causes import SHORTAGES, Cause
from libs.policy.verdict.state import ModelState

MOST_PRESSURE: Final = 1_000.0
"""The bound on an assessed pressure, which is infinite without workers for a phase."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """The pressures, missing workers and verdict of one model at one instant."""

    model: str
    engine: WorkerProfile
    work: Workload
    standing: Split
    """The present roles. Slow workers count for less in pressures, but as whole workers in numbers."""
    missing_workers: int = 0
    """The number of workers to add if no roles of the present ones suffice; otherwise 0."""
    action: Action | None = None
    code: str = ""
    """The cause behind the action; `sentence` is the verdict's sentence about it. Both are empty without an action."""
    sentence: str = ""

    def pressed(self, prefill: int, mixed: int, *, lending: bool) -> Split:
        """Return the pressures under these roles. With `lending`, decode workers compute prompts too."""
        found = split(self.engine, self.work, prefill, mixed, budgets=lending)
        return Split(prefill, mixed, bounded(found.prompt_pressure), bounded(found.decode_pressure))


def assessment_of(state: ModelState, causes: Sequence[Cause]) -> Assessment:
    """Return the assessment of a model from its state and its named causes."""
    found = state.pressures
    standing = Split(state.prefill, state.mixed, bounded(found.prefill), bounded(found.decode))
    shortage = next((each for each in causes if each.model == state.model and each.code in SHORTAGES), None)
    if shortage is None:
        return Assessment(state.model, state.engine, state.work, standing)
    because = ("", "") if shortage.action is None else (str(shortage.code), shortage.sentence)
    return Assessment(
        state.model, state.engine, state.work, standing, shortage.missing_workers, shortage.action, *because
    )


def bounded(pressure: float) -> float:
    """Limit a pressure to a value that can be sent and shown."""
    return min(pressure, MOST_PRESSURE) if isfinite(pressure) else MOST_PRESSURE
