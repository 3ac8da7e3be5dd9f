"""What a rule says of a subject at a moment. Pure."""

from dataclasses import dataclass, replace
from typing import Literal

from libs.policy.alerts.rules import Name
from libs.policy.grade import Grade

Severity = Literal["warning", "critical"]
Labels = tuple[tuple[str, str], ...]
"""What an alert is about, e.g. (("model", "m"), ("phase", "prefill"))."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One subject's grade, with the figures behind it in words."""

    name: Name
    labels: Labels
    grade: Grade | None
    """None: nothing is known now, so nothing changes."""
    reason: str
    severity: Severity = "warning"


def held_back(condition: Condition) -> Condition:
    """The same, of which nothing is known now."""
    return replace(condition, grade=None)
