"""A plan made in a process of its own, for a service that has other things to do meanwhile."""

import os
from pathlib import Path
from typing import Any

from libs.capacity.inputs import input_from_json
from libs.capacity.planning import PlanAsked, check_plan, plan_capacity, plan_json, reported_hardware
from libs.contracts.errors import InvalidRequest
from libs.lab.hardware import resolve
from libs.lab.slo import parse_slo
from libs.lab.study import quiet


def make_plan_row(
    row: dict[str, Any], asked: dict[str, Any], folder: str, device: str, *, check: bool
) -> dict[str, Any]:
    """`plan_json` of what `input_json` gave; asked: fields of `PlanAsked`, `slo` as text. Raises InvalidRequest."""
    quiet()
    found = input_from_json(row)
    wanted = PlanAsked(**{**asked, "slo": parse_slo(asked["slo"])})
    if device:
        hardware = resolve(found.model, device)
    elif found.kind is None:
        raise InvalidRequest("no worker has reported its step times yet")
    else:
        hardware = reported_hardware(found.kind, found.model)
    planned = plan_capacity(found, wanted, hardware, Path(folder))
    return plan_json(found, wanted, planned, check_plan(planned) if check else None)


def step_back() -> None:
    """Let everything else on this machine go first."""
    os.nice(10)
