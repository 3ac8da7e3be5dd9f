"""What a worker's first role makes of its process."""

from collections.abc import Mapping
from typing import Final

ROLES: Final = ("prefill", "decode", "mixed")
SPARE: Final = "spare"
"""A worker that stands by until a planner gives it a role."""
POOL: Final = "pool"
"""In place of a role, of workers that are given models by the planner."""
MIXED_BUDGET_TOKENS: Final = 256
"""Prompt tokens that one step of a mixed worker computes beside its decodes, until a planner sets it."""


def service_of(role: str) -> str:
    """The service that it starts as."""
    return "prefill" if role == "prefill" else "decode"


def role_settings(role: str) -> Mapping[str, str]:
    """What it knows of its role."""
    if role == POOL:
        return {"FULCRUM_WORKER_ROLE": "standby", "FULCRUM_WORKER_POOL": "1"}
    budget = {"FULCRUM_WORKER_BUDGET_TOKENS": str(MIXED_BUDGET_TOKENS)} if role == "mixed" else {}
    return {"FULCRUM_WORKER_ROLE": "standby" if role == SPARE else role, **budget}
