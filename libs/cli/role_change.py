"""What `fulcrum role` does: finds the worker, asks it, tells how soon that held."""

import json
from pathlib import Path
from typing import Any

from libs.cli.find import find_one_suite, get_json
from libs.contracts.errors import StartupError
from libs.contracts.roles import ROLE_NAMES, role_from_name, role_name
from libs.runtime.access import admin_token
from libs.runtime.rpc import make_channel
from libs.runtime.settings import CommonSettings, load_settings
from libs.worker.admin_client import RoleMove, WorkerAdmin

ACTOR = "fulcrum role"
DEFAULT_BUDGET_TOKENS = 256
"""Of role mixed where none is named."""


async def change_role(
    worker_id: str,
    wanted: str,
    *,
    epoch: int | None,
    reason: str,
    first_step_s: float,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Change it and print the move. Raises StartupError that says what to do, or what the worker refused it for."""
    role, budget_tokens = parse_role(wanted)
    suite, settings = find_one_suite(ready_file), load_settings(CommonSettings)
    worker = _find(worker_id, get_json(suite.planner, "/v1/workers"))
    async with make_channel(settings, worker["address"]) as channel:
        admin = WorkerAdmin(channel, worker_id, admin_token(settings, worker["address"], suite.token))
        described = await admin.describe()
        move = await admin.set_role(
            role,
            budget_tokens,
            expected_epoch=epoch or described.worker.assignment.epoch,
            incarnation=described.worker.incarnation,
            actor=ACTOR,
            reason=reason,
        )
        stands_by = role_name(move.assignment) == "standby"
        first = None if stands_by else await admin.first_step_s(move, within_s=first_step_s)
        load = (await admin.describe()).load
        there = load.running + load.waiting + load.awaiting_kv
    if as_json:
        print(json.dumps(answer(worker_id, move, first)))
    else:
        print(told(worker_id, move, first, first_step_s, there))


def parse_role(text: str) -> tuple[Any, int]:
    """The wire's role and budget of "mixed:256" and the like; raises StartupError naming what is allowed."""
    name, colon, budget = text.partition(":")
    if (colon and name != "mixed") or (colon and not budget.isdecimal()) or name not in ROLE_NAMES:
        allowed = "prefill, decode, mixed, mixed:BUDGET (prompt tokens a step) or standby"
        raise StartupError(f"role {text!r} is not one: ask for {allowed}")
    try:
        return role_from_name(name, int(budget) if colon else DEFAULT_BUDGET_TOKENS if name == "mixed" else 0)
    except ValueError as error:
        raise StartupError(str(error)) from None


def answer(worker_id: str, move: RoleMove, first_step_s: float | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "worker": worker_id,
        "role": role_name(move.assignment),
        "budget_tokens": move.assignment.budget_tokens,
        "epoch": move.assignment.epoch,
        "effect_ms": _ms(move.effect_s),
        "first_step_ms": _ms(first_step_s),
        "gateways_behind": move.gateways_behind,
        "running": move.running,
    }


def _find(worker_id: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
    for worker in workers:
        if worker["id"] == worker_id:
            return worker
    there = ", ".join(worker["id"] for worker in workers) or "none"
    raise StartupError(f"there is no worker {worker_id!r} here, but: {there}")


def told(worker_id: str, move: RoleMove, first_step_s: float | None, waited_s: float, there: int) -> str:
    """What is printed else; `there`: sequences at the worker after `waited_s`."""
    role = role_name(move.assignment)
    budget = f" with a budget of {move.assignment.budget_tokens} tokens" if move.assignment.budget_tokens else ""
    lines = [f"{worker_id} is {role}{budget} since epoch {move.assignment.epoch}."]
    if move.effect_s is None:
        lines.append(
            f"It holds there, but {move.gateways_behind} gateways have not confirmed it: their work is refused."
        )
    else:
        lines.append(f"In effect at the worker and every gateway after {_ms(move.effect_s)} ms.")
    if role != "standby":
        why = f"{there} sequences are there, of the old role or not begun" if there else "nothing was there to do"
        none = f"No step of its kind ended within {waited_s:g} s: {why}."
        lines.append(
            none if first_step_s is None else f"The first step of its kind ended after {_ms(first_step_s)} ms."
        )
    return "\n".join(lines)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
