"""The command `fulcrum planner explain --lab`: replays the demand around a decision with and without it."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from libs.cli.find import find_suite, get_json
from libs.cli.lab.calibrate import learned_of_suite
from libs.cli.lab.record import Recording, find_broker, read_all
from libs.contracts.errors import InvalidRequest, StartupError
from libs.contracts.roles import role_from_name
from libs.lab.counterfactual import AFTER_S, LEAD_S, RoleAndBudget, counterfactual
from libs.lab.experiment import HOP_MS, MAX_SEQUENCES, Experiment, gpu_link_gbps
from libs.lab.hardware import calibrated
from libs.lab.slo import parse_slo
from libs.lab.traces.recording import recorded_trace
from libs.policy.roles import Role

# The gateways' defaults.
SLO: Final = "ttft=5s,tpot=100ms"
# As many decisions as the planner keeps.
MOST: Final = 1_000


def replayed_in_lab(decision: Mapping[str, Any], ready_file: Path | None) -> dict[str, Any]:
    """Return `without`, `with_it` and `useful` for a decision that changed workers.

    Raise StartupError if workers or broker do not answer, InvalidRequest if there is nothing to replay.
    """
    if not decision["changes"] or not decision["changes"][0]["epoch"]:
        raise InvalidRequest(f"decision {decision['id']} changed no worker: there is nothing to replay without it")
    suite = find_suite(ready_file)
    listed: list[dict[str, Any]] = get_json(suite.planner, "/v1/workers")
    standing = standing_before(decision, listed, get_json(suite.planner, "/v1/decisions", limit=str(MOST)))
    names = sorted(standing)
    places = {name: place for place, name in enumerate(names)}
    hardware, notes = calibrated("live", [each for each in learned_of_suite(suite) if each.worker_id in places])
    recording = Recording()
    asyncio.run(read_all(find_broker(ready_file, "", ""), recording))
    begin_ns = decision["decided_unix_ns"] - round(LEAD_S * 1e9)
    end_ns = decision["decided_unix_ns"] + round(AFTER_S * 1e9)
    around = [each for each in recording.events if begin_ns <= each.arrival_unix_ns < end_ns]
    trace = recorded_trace([each for each in around if each.model == decision["model"]], name="live")
    if not trace.requests:
        raise InvalidRequest("no request from around this decision has ended yet, or the broker no longer holds it")
    first_ns = min(each.arrival_unix_ns for each in around)
    experiment = Experiment(
        trace=trace,
        hardware=hardware,
        workers=len(names),
        slo=parse_slo(SLO),
        link_gbps=gpu_link_gbps(hardware),
        hop_ms=HOP_MS if hardware.hop_ms is None else hardware.hop_ms,
        max_sequences=hardware.max_sequences or MAX_SEQUENCES,
        chunk_tokens=hardware.chunk_tokens,
    )
    changes = {places[each["worker"]]: _standing(each["role"], each["budget_tokens"]) for each in decision["changes"]}
    at_s = max(decision["decided_unix_ns"] - first_ns, 0) / 1e9
    found = counterfactual(experiment, [standing[name] for name in names], changes, at_s)
    return {
        **asdict(found),
        "useful": found.useful,
        "method": "lab",
        "over_s": AFTER_S,
        "notes": [*notes, *trace.notes],
    }


def standing_before(
    decision: Mapping[str, Any], workers: list[dict[str, Any]], decisions: list[dict[str, Any]]
) -> dict[str, RoleAndBudget]:
    """Return each worker's role before the decision, by undoing every later decision from the present roles.

    Raise StartupError if a changed worker is gone.
    """
    standing = {
        each["id"]: _standing(each["role"], each["budget_tokens"])
        for each in workers
        if each["model"] == decision["model"]
    }
    newest_first = sorted(decisions, key=lambda each: (each["decided_unix_ns"], each["sequence"]), reverse=True)
    for each in newest_first:
        if each["decided_unix_ns"] < decision["decided_unix_ns"]:
            break
        for change in each["changes"]:
            if change["before"] and change["worker"] in standing:
                standing[change["worker"]] = _standing(change["before"], change["before_budget_tokens"])
    for change in decision["changes"]:
        if change["worker"] not in standing:
            raise StartupError(f"worker {change['worker']} is gone: its work without the decision is unknown")
        if "standby" in (change["role"], change["before"]):
            raise InvalidRequest("the lab has no workers on standby: decisions that start them are not replayed")
    return {name: each for name, each in standing.items() if each.role is not Role.STANDBY}


def _standing(role: str, budget_tokens: int) -> RoleAndBudget:
    number, budget = role_from_name(role, budget_tokens)
    return RoleAndBudget(Role(number), budget)
