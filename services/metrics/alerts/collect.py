"""From what the service knows to what alerts are decided from. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from libs.contracts.roles import role_name
from libs.telemetry.cells import COVERED, DECODE, KV_WAIT, PREFILL, ROLE_NUMBERS
from libs.telemetry.facts import WorkerFacts
from libs.telemetry.fleet import Fleet, is_heard
from libs.telemetry.gateways import Gateways, Waiting
from libs.telemetry.rollups import RollUps
from services.metrics.alerts.burn import BurnLog
from services.metrics.alerts.snapshot import Pool, Snapshot, Worker
from services.metrics.occupancy import kv_used, since_step_ns
from services.metrics.queues import PHASE_ROLES, are_heard, at_gateways


def take_snapshot(
    fleet: Fleet, rollups: RollUps, gateways: Gateways, burns: BurnLog, now_ns: int, *, lag_ns: int, window_ns: int
) -> Snapshot:
    """As of now; shares of time are of the window that ended `lag_ns` ago."""
    listed = list(fleet.listed(now_ns))
    offsets_ns = fleet.clocks.offsets_ns(now_ns)
    heard_ns = fleet.latest_arrival_ns
    heard = [facts for facts in listed if is_heard(facts, now_ns)]
    depths = _Depths(gateways.waiting(now_ns), offsets_ns, now_ns)
    return Snapshot(
        at_ns=now_ns,
        pools=list(_pools(heard, depths, rollups, now_ns - lag_ns, window_ns)),
        workers=[_worker(facts, fleet, now_ns + offsets_ns.get(facts.node, 0)) for facts in listed],
        burns=burns.burns(now_ns),
        silent_ns=None if heard_ns is None else max(now_ns - heard_ns, 0),
    )


class _Depths(NamedTuple):
    """What waits for pools at a moment."""

    at_gateways: dict[str, Waiting] | None
    offsets_ns: dict[str, int]
    now_ns: int

    def waiting(self, members: list[WorkerFacts], model: str, phase: str) -> int | None:
        """At workers and gateways; None while it is not known."""
        if self.at_gateways is None or not are_heard(members, self.offsets_ns, self.now_ns):
            return None
        requests, tokens = at_gateways(self.at_gateways.get(model, Waiting()), phase)
        return (tokens if phase == "prefill" else requests) + sum(_waiting(facts, phase) for facts in members)


def _pools(heard: list[WorkerFacts], depths: _Depths, rollups: RollUps, end_ns: int, window_ns: int) -> Iterator[Pool]:
    """Of every model and phase that has workers that are heard; their time counts for the role they had when they spent
    it."""
    written = [facts for facts in heard if not facts.left and rollups.knows(facts.worker_id)]
    by_model: dict[str, list[int]] = {}
    by_role: dict[tuple[str, str], list[WorkerFacts]] = {}
    for place, facts in enumerate(written):
        model = facts.assignment.model
        by_model.setdefault(model, []).append(place)
        by_role.setdefault((model, role_name(facts.assignment)), []).append(facts)
    first = rollups.tiers[0].window_ns
    series = rollups.read(first, end_ns - window_ns, end_ns, [facts.worker_id for facts in written])
    gpus = np.array([facts.gpus for facts in written], np.int64)
    for model in sorted(by_model):
        places = by_model[model]
        times_ns, had = series.times_ns[:, places], series.roles[:, places]
        for phase, roles in PHASE_ROLES.items():
            members = [facts for role in roles for facts in by_role.get((model, role), ())]
            if not members:
                continue
            counts = np.isin(had, [ROLE_NUMBERS[role] for role in roles]) * gpus[places]
            times = np.einsum("nwp,nw->p", times_ns, counts).tolist()
            yield Pool(
                model=model,
                phase=phase,
                workers=len(members),
                gpus=sum(facts.gpus for facts in members),
                covered_ns=times[COVERED],
                busy_ns=times[PREFILL] + times[DECODE],
                kv_wait_ns=times[KV_WAIT],
                waiting=depths.waiting(members, model, phase),
                places=sum(facts.max_sequences for facts in members),
                taken=sum(facts.load.running + facts.load.awaiting_kv for facts in members),
            )


def _waiting(facts: WorkerFacts, phase: str) -> int:
    """Of prefill, what is left of all prompts but one: a worker that computes its only prompt has no queue."""
    load = facts.load
    if phase == "decode":
        return load.waiting
    prompts = load.running + load.waiting
    return load.waiting_prefill_tokens * (prompts - 1) // prompts if prompts else 0


def _worker(facts: WorkerFacts, fleet: Fleet, now_ns: int) -> Worker:
    """`now_ns` is by the clock of the worker's node, as far as that is known."""
    load = facts.load
    return Worker(
        id=facts.worker_id,
        node=facts.node,
        model=facts.assignment.model,
        silent_ns=max(now_ns - facts.covered_to_unix_ns, 0),
        left=facts.left,
        at_hand=load.running + load.waiting + load.awaiting_kv,
        since_step_ns=since_step_ns(facts, fleet.last_step_end_ns(facts.worker_id)),
        reader=fleet.reader(facts.worker_id) or "",
        kv_used=kv_used(facts),
    )
