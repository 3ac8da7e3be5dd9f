"""Evaluation of the alert rules on snapshots of the service's state."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from libs.policy.alerts.burn import BurnLog
from libs.policy.alerts.rules import AlertLimits, Condition, PhasePool, Snapshot, WorkerReport
from libs.policy.alerts.store import Alert, AlertStore
from libs.policy.alerts.watch import AlertWatch, every_ns
from libs.policy.copies import LostCopies, UnreachableBrokers
from libs.policy.verdict.causes import Cause
from libs.telemetry.columns import Ints
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.gateways import GatewayReports, ModelBacklog
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, PREFILL, ROLE_NUMBERS, RollUps
from libs.telemetry.workers import Loads
from services.metrics.accounting.answer import kv_used
from services.metrics.accounting.queues import PHASE_ROLES, are_fresh, at_gateways, pool_indices
from services.metrics.state import MetricsState


def take_snapshot(
    fleet: FleetTelemetry,
    rollups: RollUps,
    gateways: GatewayReports,
    burns: BurnLog,
    now_ns: int,
    *,
    lag_ns: int,
    window_ns: int,
) -> Snapshot:
    """Take a snapshot of the present; shares of time cover the window that ended `lag_ns` ago."""
    loads, offsets_ns, received_ns = (
        fleet.directory.loads(now_ns),
        fleet.clocks.offsets_ns(now_ns),
        fleet.latest_arrival_ns,
    )
    depths = _Depths(loads, gateways.waiting(now_ns), offsets_ns, now_ns)
    return Snapshot(
        at_ns=now_ns,
        pools=list(_pools(depths, rollups, now_ns - lag_ns, window_ns)),
        workers=_workers(fleet, loads, offsets_ns, now_ns),
        burns=burns.burns(now_ns),
        silent_ns=None if received_ns is None else max(now_ns - received_ns, 0),
        links=fleet.kv_links(now_ns),
    )


class _Depths(NamedTuple):
    """The queue depths of all pools at one moment."""

    loads: Loads
    at_gateways: dict[str, ModelBacklog] | None
    offsets_ns: dict[str, int]
    now_ns: int

    def waiting(self, indices: Ints, model: str, phase: str) -> int | None:
        """Return the queue at workers and gateways; None while it is unknown."""
        if self.at_gateways is None or not are_fresh(self.loads, indices, self.offsets_ns, self.now_ns):
            return None
        requests, tokens = at_gateways(self.at_gateways.get(model, ModelBacklog()), phase)
        return (tokens if phase == "prefill" else requests) + int(_waiting(self.loads, phase)[indices].sum())


def _pools(depths: _Depths, rollups: RollUps, end_ns: int, window_ns: int) -> Iterator[PhasePool]:
    """Yield the pools of every model and phase with live workers; time counts for the role at which it was spent."""
    loads, listing = depths.loads, depths.loads.listing
    known = np.array([rollups.knows(worker_id) for worker_id in listing.ids], np.bool_)
    counted = loads.reporting & ~listing.left & known
    indices = np.flatnonzero(counted)
    series = rollups.read(
        rollups.tiers[0].window_ns, end_ns - window_ns, end_ns, [listing.ids[index] for index in indices.tolist()]
    )
    # Column of each worker's time in the series, by its index.
    columns = np.cumsum(counted) - 1
    gpus = listing.gpus
    for model in sorted({model for model, _ in listing.pools}):
        own = np.concatenate([pool for (name, _), pool in listing.pools.items() if name == model])
        own = own[counted[own]]
        times_ns, had = series.times_ns[:, columns[own]], series.roles[:, columns[own]]
        for phase, roles in PHASE_ROLES.items():
            members = pool_indices(listing, model, phase)
            members = members[counted[members]]
            if not len(members):
                continue
            counts = np.isin(had, [ROLE_NUMBERS[role] for role in roles]) * gpus[own]
            times = np.einsum("nwp,nw->p", times_ns, counts).tolist()
            yield PhasePool(
                model=model,
                phase=phase,
                workers=len(members),
                gpus=int(gpus[members].sum()),
                covered_ns=times[COVERED],
                busy_ns=times[PREFILL] + times[DECODE],
                kv_wait_ns=times[KV_WAIT],
                waiting=depths.waiting(members, model, phase),
                places=sum(listing.workers[index].max_sequences for index in members.tolist()),
                taken=int((loads.running + loads.awaiting_kv)[members].sum()),
            )


def _waiting(loads: Loads, phase: str) -> Ints:
    """Return a phase's queue [workers]: waiting sequences for decode, prompt tokens for prefill.

    One average prompt is left out of prefill, as a worker that computes its only prompt has no queue.
    """
    if phase == "decode":
        return loads.waiting
    prompts = loads.running + loads.waiting
    tokens = loads.waiting_prefill_tokens
    return np.where(prompts > 0, tokens + -tokens // np.maximum(prompts, 1), 0)


def _workers(fleet: FleetTelemetry, loads: Loads, offsets_ns: dict[str, int], now_ns: int) -> list[WorkerReport]:
    listing = loads.listing
    # In the clock of each worker's node, as far as its offset is known.
    ahead_ns = np.array([offsets_ns.get(worker.node, 0) for worker in listing.workers], np.int64)
    silent_ns = np.maximum(now_ns + ahead_ns - loads.covered_to_ns, 0).tolist()
    since_step_ns = np.maximum(loads.covered_to_ns - fleet.last_step_ends_ns(listing.ids), 0).tolist()
    at_hand = (loads.running + loads.waiting + loads.awaiting_kv).tolist()
    reporting, free = loads.reporting.tolist(), loads.free_kv_blocks.tolist()
    return [
        WorkerReport(
            id=worker.worker_id,
            node=worker.node,
            model=worker.model,
            silent_ns=silent_ns[index],
            left=worker.left,
            # An observed server may have worked all the time.
            at_hand=0 if fleet.estimates.is_unknown(worker.worker_id) else at_hand[index],
            since_step_ns=since_step_ns[index],
            reader=worker.reader,
            kv_used=kv_used(free[index], worker.kv_blocks) if reporting[index] else None,
        )
        for index, worker in enumerate(listing.workers)
    ]


class AlertEvaluator:
    """The alert evaluator, which passes alerts that fire or end to `observers`."""

    def __init__(self, state: MetricsState, limits: AlertLimits, *, lag_ns: int) -> None:
        self._state = state
        self._watch = AlertWatch(limits)
        self._lag_ns = lag_ns
        self._looked_ns = 0
        self._workers = 0
        """The number of workers at the last evaluation."""
        self.observers: list[Callable[[list[Alert]], None]] = []
        self.judged: Callable[[int], tuple[Sequence[Cause], frozenset[str]]] = lambda _: ((), frozenset())
        """Returns the causes of the verdicts at a moment, and the models for which enough is known."""
        self.lost_copies: Callable[[], LostCopies | None] = lambda: None
        """A reader of the topics' copies that brokers lack."""
        self.unreachable_brokers: Callable[[], UnreachableBrokers | None] = lambda: None
        """A reader of the brokers that this service cannot reach."""

    @property
    def book(self) -> AlertStore:
        return self._watch.book

    @property
    def unfollowed_signs(self) -> int:
        """The number of signs whose subjects were dropped for lack of room."""
        return self._watch.machine.unfollowed_signs

    def foresee(self, ahead: Sequence[Condition]) -> None:
        self._watch.ahead = ahead

    async def look(self, now_ns: int) -> list[Alert]:
        """Evaluate if an evaluation is due, and return the changed alerts. It yields to the event loop half-way, since
        each half takes as long as a round over 1,000 workers.
        """
        if not self._is_time(now_ns):
            return []
        snapshot = self._snapshot(now_ns)
        await asyncio.sleep(0)
        return self._decide(snapshot)

    def _is_time(self, now_ns: int) -> bool:
        every = every_ns(self._workers)
        if now_ns // every == self._looked_ns // every:
            return False
        self._looked_ns = now_ns
        return True

    def _snapshot(self, now_ns: int) -> Snapshot:
        state = self._state
        snapshot = take_snapshot(
            state.fleet,
            state.rollups,
            state.gateways,
            state.burns,
            now_ns,
            lag_ns=self._lag_ns,
            window_ns=self._watch.limits.window_ns,
        )
        self._workers = len(snapshot.workers)
        causes, judged = self.judged(now_ns)
        return replace(
            snapshot,
            causes=causes,
            judged=judged,
            lost_copies=self.lost_copies(),
            unreachable=self.unreachable_brokers(),
        )

    def _decide(self, snapshot: Snapshot) -> list[Alert]:
        changed = self._watch.look(snapshot)
        if changed:
            for observer in self.observers:
                observer(changed)
        return changed
