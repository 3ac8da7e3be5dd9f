"""The command `fulcrum role`: find workers, change their roles, and report the delay until each change took effect."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.cli.find import call_settings, find_one_suite, get_json, local_user
from libs.contracts.errors import Conflict, FulcrumError, StartupError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.roles import ROLE_NAMES, role_from_name, role_name
from libs.keys.table import SUITE_TOKEN, actor_of
from libs.policy.roles import end_refusal, ended_by
from libs.runtime.net.access import admin_token
from libs.runtime.net.rpc import make_channel
from libs.worker.admin_client import RoleMove, WorkerAdmin

# The budget of role mixed if none is given.
DEFAULT_BUDGET_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """Ids of workers, and the text of their requested role."""

    workers: Sequence[str]
    role: str


@dataclass(frozen=True, slots=True)
class WorkerMove:
    """The outcome of one worker's move; `move` is None if the worker already had the role."""

    worker: str
    assignment: Assignment
    move: RoleMove | None = None
    first_step_s: float | None = None
    there: int = 0
    """The number of sequences on the worker at the end of the wait for its first step."""


def change(
    ready: Path | None,
    *,
    words: Sequence[str],
    epoch: int | None,
    reason: str,
    force: bool,
    first_step_s: float,
    as_json: bool,
) -> None:
    """Change roles by the command line's words: workers and then their role, any number of times.

    Raise StartupError.
    """
    asyncio.run(
        change_roles(
            split_groups(words),
            epoch=epoch,
            reason=reason,
            force=force,
            first_step_s=first_step_s,
            ready_file=ready,
            as_json=as_json,
        )
    )


def split_groups(words: Sequence[str]) -> list[RoleGroup]:
    """Split words such as "a b prefill c decode" into workers and their roles. Raise StartupError."""
    groups: list[RoleGroup] = []
    workers: list[str] = []
    for number, word in enumerate(words, 1):
        # The last word is a role even if it is invalid: `parse_role` lists the allowed ones.
        if word.partition(":")[0] not in ROLE_NAMES and number < len(words):
            workers.append(word)
            continue
        parse_role(word)
        if not workers:
            raise StartupError(f"no worker is named before {word}: write WORKER... ROLE, such as gpu-1 prefill")
        groups.append(RoleGroup(workers, word))
        workers = []
    return groups


def wanted_roles(groups: Sequence[RoleGroup], known: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Assignment]]:
    """Return each listed worker that is named, or shares a group with one, and its wanted role and budget.

    Raise StartupError for an unknown worker and for one with two roles.
    """
    wanted: dict[str, tuple[dict[str, Any], Assignment]] = {}
    for group in groups:
        role, budget_tokens = parse_role(group.role)
        assignment = Assignment(role=role, budget_tokens=budget_tokens)
        for worker in with_groups([_find(each, known) for each in dict.fromkeys(group.workers)], known):
            _, other = wanted.setdefault(worker["id"], (worker, assignment))
            if other != assignment:
                raise StartupError(
                    f"{worker['id']} is given two roles, {role_name(other)} and {role_name(assignment)}: name one"
                )
    return list(wanted.values())


async def change_roles(
    groups: Sequence[RoleGroup],
    *,
    epoch: int | None,
    reason: str,
    force: bool,
    first_step_s: float,
    ready_file: Path | None,
    as_json: bool,
) -> None:
    """Change the roles concurrently, and print each move in the order of the workers' names in `groups`.

    All moves are checked before any is sent. Raise StartupError with a remedy, or with the reasons of workers that
    refused.
    """
    suite, settings = find_one_suite(ready_file), call_settings()
    known = get_json(suite.planner, "/v1/workers")
    found = wanted_roles(groups, known)
    if not force:
        _check_others({worker["id"]: assignment for worker, assignment in found}, known)
    # A worker knows nothing of the others' moves: alone it would refuse to swap roles with the last one.
    force = force or len(groups) > 1

    async def change(worker: dict[str, Any], wanted: Assignment) -> WorkerMove:
        async with make_channel(settings, worker["address"]) as channel:
            admin = WorkerAdmin(channel, worker["id"], admin_token(settings, worker["address"], suite.token))
            described = await admin.describe()
            current = described.worker.assignment
            held = (current.role, current.budget_tokens) == (wanted.role, wanted.budget_tokens)
            if held and epoch in (None, current.epoch):
                return WorkerMove(worker["id"], current)
            move = await admin.set_role(
                wanted.role,
                wanted.budget_tokens,
                expected_epoch=epoch or current.epoch,
                incarnation=described.worker.incarnation,
                actor=actor_of(SUITE_TOKEN, local_user()),
                reason=reason,
                force=force,
            )
            stands_by = role_name(move.assignment) == "standby"
            first = None if stands_by else await admin.first_step_s(move, within_s=first_step_s)
            load = (await admin.describe()).load
            return WorkerMove(
                worker["id"], move.assignment, move, first, load.running + load.waiting + load.awaiting_kv
            )

    done = await asyncio.gather(*(change(*each) for each in found), return_exceptions=True)
    moved = [each for each in done if isinstance(each, WorkerMove)]
    if as_json:
        answers = [answer(each) for each in moved]
        if answers:
            print(json.dumps(answers if len(found) > 1 else answers[0]))
    else:
        for each in moved:
            print(reported(each, first_step_s))
    _raise_first(done)


def _check_others(wanted: Mapping[str, Assignment], known: Sequence[dict[str, Any]]) -> None:
    """Raise Conflict if a phase of a model would lose its last worker. A single worker may take any role."""
    for model in dict.fromkeys(each["model"] for each in known if each["id"] in wanted):
        serving = [each for each in known if each["model"] == model and each["state"] == "ready"]
        moved = [each["id"] for each in serving if each["id"] in wanted]
        if len(serving) < 2:
            continue
        before = [_assignment(each) for each in serving]
        after = [wanted.get(each["id"], held) for each, held in zip(serving, before, strict=True)]
        if ended := ended_by(before, after):
            raise Conflict(end_refusal(model, moved, ended, force="pass --force"))


def _assignment(worker: dict[str, Any]) -> Assignment:
    """Return the assignment of a listed worker: a decode worker with a budget lends it to prefill."""
    budget_tokens = worker["budget_tokens"]
    role, _ = role_from_name("mixed" if budget_tokens else worker["role"], budget_tokens)
    return Assignment(role=role, budget_tokens=budget_tokens)


def _raise_first(done: Sequence[WorkerMove | BaseException]) -> None:
    """Raise one error for all refusals. Any other exception is raised unchanged."""
    failed = [each for each in done if isinstance(each, BaseException)]
    for error in failed:
        if len(failed) == 1 or not isinstance(error, FulcrumError):
            raise error
    if failed:
        raise StartupError("; ".join(str(error) for error in failed))


def parse_role(text: str) -> tuple[Any, int]:
    """Return the protobuf role and budget of a text such as "mixed:256". Raise StartupError, which lists the allowed
    values.
    """
    name, colon, budget = text.partition(":")
    if (colon and name != "mixed") or (colon and not budget.isdecimal()) or name not in ROLE_NAMES:
        allowed = "prefill, decode, mixed, mixed:BUDGET (prompt tokens a step) or standby"
        raise StartupError(f"role {text!r} is unknown: use {allowed}")
    try:
        return role_from_name(name, int(budget) if colon else DEFAULT_BUDGET_TOKENS if name == "mixed" else 0)
    except ValueError as error:
        raise StartupError(str(error)) from None


def answer(moved: WorkerMove) -> dict[str, Any]:
    move = moved.move
    return {
        "worker": moved.worker,
        "role": role_name(moved.assignment),
        "budget_tokens": moved.assignment.budget_tokens,
        "epoch": moved.assignment.epoch,
        "changed": move is not None,
        "effect_ms": _ms(move.effect_s) if move else None,
        "first_step_ms": _ms(moved.first_step_s),
        "gateways_behind": move.gateways_behind if move else 0,
        "running": move.running if move else None,
    }


def _find(worker_id: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
    for worker in workers:
        if worker["id"] == worker_id:
            return worker
    there = ", ".join(worker["id"] for worker in workers) or "none"
    raise StartupError(f"there is no worker {worker_id!r} here; there are: {there}")


def with_groups(found: list[dict[str, Any]], workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the other ranks of the workers' data-parallel groups, which share one role."""
    named = {each["id"] for each in found}
    groups = {(each.get("model"), each["group"]) for each in found if each.get("group")}
    return found + [
        each for each in workers if (each.get("model"), each.get("group")) in groups and each["id"] not in named
    ]


def reported(moved: WorkerMove, waited_s: float) -> str:
    """Describe a move whose first step was awaited for `waited_s` seconds."""
    move, assignment = moved.move, moved.assignment
    role = role_name(assignment)
    budget = f" with a budget of {assignment.budget_tokens} tokens" if assignment.budget_tokens else ""
    if move is None:
        return f"{moved.worker} is {role}{budget} already: unchanged, epoch {assignment.epoch}."
    lines = [f"{moved.worker} is {role}{budget} since epoch {assignment.epoch}."]
    if move.effect_s is None:
        lines.append(
            f"It holds there, but {move.gateways_behind} gateways have not confirmed it: their work is refused."
        )
    else:
        lines.append(
            f"In effect after {_ms(move.effect_s)} ms: from the call until the worker refused work of the old role "
            "and every gateway had confirmed the new one."
        )
    if role != "standby" and waited_s > 0:
        there = moved.there
        why = f"{there} sequences are there, of the old role or not begun" if there else "nothing was there to do"
        none = f"No step of its kind ended within {waited_s:g} s: {why}."
        first = moved.first_step_s
        lines.append(none if first is None else f"The first step of its kind ended after {_ms(first)} ms.")
    return "\n".join(lines)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
