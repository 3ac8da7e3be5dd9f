"""The capacity and work of each model's workers, from telemetry and gateway queues: the input of role planning.

Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.protocol import FRESH_NS
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.policy.planner.advice import KvSpeed, decodes_to_come, pressing_tokens, workload
from libs.policy.planner.due import due_within_ns
from libs.policy.planner.groups import gather, share
from libs.policy.planner.role_planning import PlannedWorker, RoleOrder
from libs.policy.planner.snapshot import ClusterSnapshot, RolePool
from libs.policy.pressure import WorkerProfile, Workload, usual_link_ns
from libs.policy.roles import MAX_BUDGET_TOKENS, Role
from libs.policy.speed import image_ns
from libs.policy.step_time import StepTimeModel
from libs.telemetry.gateways import ModelBacklog
from services.planner.fleet_view import COVERED, PREFILL, ROLES, Bools, FleetView, Ints

# The share of a model's ready workers that must report before any decision about the model.
REPORTING_SHARE: Final = 0.5
# The minimum time of a step. Fitted models that predict less are ignored.
LEAST_NS: Final = 1.0
_ROLES: Final = {int(role): role for role in Role}


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A model's workers, their capacity and their work. If `engine` is None, `unknown` names the missing data."""

    model: str
    engine: WorkerProfile | None
    work: Workload
    standings: Sequence[PlannedWorker]
    unknown: str = ""
    gpus: int = 0
    links: Sequence[KvSpeed] = ()
    """The speeds of KV transfers, for all workers that have received any."""
    age_ns: int = 0
    """The median age of the last reports of workers with work."""
    strays: Sequence[RoleOrder] = ()
    """The orders for data-parallel ranks whose role differs from that of their group."""
    ranks: int = 1
    """The number of data-parallel ranks for which each worker stands."""


@dataclass(frozen=True, slots=True)
class ObservedCluster:
    models: Sequence[ObservedModel]
    """The models that have workers with a role."""
    snapshot: ClusterSnapshot


@dataclass(frozen=True, slots=True)
class Look:
    """The inputs of an observation besides telemetry."""

    requested_assignments: Mapping[str, Assignment]
    """The requested assignments of workers whose telemetry shows nothing later, by worker id."""
    waiting: Mapping[str, ModelBacklog] | None
    """The backlog at gateways by model; None if no gateway reports."""
    tpot_ns: Callable[[str], int]
    """A function that returns a model's TPOT target in ns."""
    pinned: Bools
    now_ns: int
    end_ns: int
    """The end of the window from which recent computation is taken."""
    ttft_ns: Mapping[str, int] = field(default_factory=dict)
    """The strictest TTFT target that a tenth of a model's requests have, by model.

    Prompts of a model without an entry are due soon.
    """


@dataclass(frozen=True, slots=True)
class _Columns:
    """Arrays of shape [workers] in the order of the roster."""

    role: Ints
    budget_tokens: Ints
    fresh: Bools
    """True if the worker has reported within `FRESH_NS`."""
    kv_tokens: Ints
    """The number of KV tokens of each worker's sequences; 0 if the worker has not reported."""
    times_ns: Ints
    """[workers, 3] The covered, prefill and decode time in the window."""


class Observer:
    """An observer of all models' workers. It caches the models' profiles until step times change."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._engines: dict[str, tuple[int, bytes, WorkerProfile | str]] = {}

    def look(self, look: Look) -> ObservedCluster:
        """Return the present state of all models and pools."""
        view, roster = self._view, self._view.roster
        role, budget, _ = view.role_now()
        for name, assignment in look.requested_assignments.items():
            index = roster.index_of[name]
            role[index], budget[index] = assignment.role, assignment.budget_tokens
        held = np.maximum(roster.kv_blocks - view.column("free_kv_blocks"), 0) * roster.block_tokens
        columns = _Columns(
            role=role,
            budget_tokens=budget,
            fresh=view.received_ns > look.now_ns - FRESH_NS,
            kv_tokens=np.where(view.is_known(), held, 0),
            times_ns=view.times_ns(look.end_ns),
        )
        models = []
        for model, members in roster.models.items():
            indices = members[_has_role(role[members])]
            if len(indices):
                models.append(self._model(model, indices, columns, look))
        self._engines = {name: each for name, each in self._engines.items() if name in roster.models}
        return ObservedCluster(models, _snapshot(view, columns))

    def _model(self, model: str, indices: Ints, columns: _Columns, look: Look) -> ObservedModel:
        roster, fresh = self._view.roster, columns.fresh[indices]
        gathered = gather(_standings(self._view, indices, columns, look.pinned), roster.groups)
        reporting, tpot_ns = indices[fresh], look.tpot_ns(model)
        if gathered.incomplete:
            reporting = reporting[[roster.ids[index] not in gathered.incomplete for index in reporting.tolist()]]
        found = self._engine(model, reporting)
        unknown = _too_few(roster.ready[indices], fresh) or gathered.unknown
        unknown = unknown or (found if isinstance(found, str) else "")
        if look.waiting is None:
            unknown = unknown or "no gateway reports its queue"
        engine, work = None, Workload(0.0, 0, 0, tpot_ns)
        if not unknown and isinstance(found, WorkerProfile):
            at_gateways = (look.waiting or {}).get(model, ModelBacklog())
            due_ns = due_within_ns(look.ttft_ns.get(model, 0))
            work = _work(self._view, found, reporting, columns, at_gateways, tpot_ns=tpot_ns, due_ns=due_ns)
            work = share(work, gathered.ranks)
            engine = found
        return ObservedModel(
            model,
            engine,
            work,
            gathered.workers,
            unknown,
            int(roster.gpus[indices].sum()),
            _links(self._view, indices),
            _age_ns(self._view, reporting, look.now_ns),
            gathered.strays,
            gathered.ranks,
        )

    def _engine(self, model: str, reporting: Ints) -> WorkerProfile | str:
        """Return a profile with the worst value of any worker in each respect, or the name of the missing data.

        A change of roles must not require more than every single worker can do.
        """
        key, known = reporting.tobytes(), self._engines.get(model)
        if known is not None and known[:2] == (self._view.revision, key):
            return known[2]
        engine = _engine(self._view, reporting)
        self._engines[model] = self._view.revision, key, engine
        return engine


def _has_role(role: Ints) -> Bools:
    # The values of `Role` are contiguous.
    return (role >= min(Role)) & (role <= max(Role))


def _age_ns(view: FleetView, reporting: Ints, now_ns: int) -> int:
    # Ages are by the clocks of the workers. Idle workers report rarely, but their state has not changed either.
    busy = reporting[(view.column("running") + view.column("waiting"))[reporting] > 0]
    covered_to_ns = view.column("covered_to_unix_ns")[busy]
    return max(now_ns - int(np.median(covered_to_ns)), 0) if len(covered_to_ns) else 0


def _links(view: FleetView, indices: Ints) -> list[KvSpeed]:
    roster = view.roster
    known = indices[view.kv_token_ns[indices] > 0]
    return [
        KvSpeed(roster.ids[at], float(roster.kv_token_bytes[at] / view.kv_token_ns[at]), roster.workers[at].gpus > 0)
        for at in known.tolist()
    ]


def _too_few(ready: Bools, fresh: Bools) -> str:
    count, whole = int((ready & fresh).sum()), int(ready.sum())
    return "" if count >= max(whole * REPORTING_SHARE, 1) else f"{count} of {whole} workers report"


def _standings(view: FleetView, indices: Ints, columns: _Columns, pinned: Bools) -> list[PlannedWorker]:
    roster, own = view.roster, view.roster.own_budgets
    movable = columns.fresh & roster.paired & roster.ready
    reported = (
        [roster.ids[index] for index in indices.tolist()],
        map(_ROLES.__getitem__, columns.role[indices].tolist()),
        columns.budget_tokens[indices].tolist(),
        movable[indices].tolist(),
        view.column("waiting_prefill_tokens")[indices].tolist(),
        columns.kv_tokens[indices].tolist(),
        pinned[indices].tolist(),
        roster.keeps_budget[indices].tolist(),
        [own.get(roster.ids[index], 0) for index in indices.tolist()] if own else [0] * len(indices),
    )
    return list(map(PlannedWorker._make, zip(*reported, strict=True)))  # takes a third of the time of a call


def _engine(view: FleetView, reporting: Ints) -> WorkerProfile | str:
    roster = view.roster
    chunks, sequences = roster.chunk_tokens[reporting], roster.max_sequences[reporting]
    model = _step_time(view, reporting)
    if model is None:
        return "no worker has said how long its steps take"
    if not chunks.any() or not sequences.any():
        return "no worker has said how many tokens and sequences a step takes"
    kv_tokens = int((roster.kv_blocks[reporting] * roster.block_tokens[reporting]).min())
    chunk_tokens = min(int(chunks[chunks > 0].min()), MAX_BUDGET_TOKENS)
    kv_token_ns = usual_link_ns(view.kv_token_ns[reporting].tolist())
    return WorkerProfile(model, chunk_tokens, int(sequences[sequences > 0].min()), kv_tokens, kv_token_ns)


def _step_time(view: FleetView, reporting: Ints) -> StepTimeModel | None:
    """Return step times combined from several workers.

    Each part comes from the worker with most steps of its kind, because a worker in one role measures few steps of the
    other.
    """
    seen = view.seen_steps[:, reporting]
    known = np.flatnonzero(seen[0])
    base = view.step_times[int(reporting[known[0]])] if len(known) else None
    if base is None:
        return None
    fits: dict[StepKind, FittedModel] = {}
    for kind, counts in zip(StepKind, seen, strict=True):
        most = int(counts.argmax())
        fitted = view.step_times[int(reporting[most])] if counts[most] > 1 else None
        if fitted is not None:
            fits[kind] = fitted
    model = combine(base.model, fits)
    sane = min(model.chunks_ns(1, 1), model.decode_fixed_ns + model.decode_sequence_ns) >= LEAST_NS
    return model if sane else None


def _work(
    view: FleetView,
    engine: WorkerProfile,
    reporting: Ints,
    columns: _Columns,
    at_gateways: ModelBacklog,
    *,
    tpot_ns: int,
    due_ns: float,
) -> Workload:
    """Return the work of a model: recent computation, and all work that runs or waits at workers and gateways."""
    covered, prefill_ns = columns.times_ns[reporting, COVERED], columns.times_ns[reporting, PREFILL]
    served = float((prefill_ns[covered > 0] / covered[covered > 0]).sum())
    running, waiting = view.column("running")[reporting], view.column("waiting")[reporting]
    prompt_tokens = view.column("waiting_prefill_tokens")[reporting]
    computes = columns.role[reporting] == Role.PREFILL
    at_gateways_tokens = pressing_tokens(served, at_gateways.hopeful_tokens, at_gateways.prompt_tokens)
    # At a worker with prompt tokens, the waiting sequences are prompts.
    queued = np.where(prompt_tokens > 0, 0, waiting)
    decoding = (running + queued + view.column("awaiting_kv")[reporting])[~computes]
    decodes, kv_tokens = int(decoding.sum()), int(columns.kv_tokens[reporting][~computes].sum())
    reported = (running[computes].tolist(), waiting[computes].tolist(), prompt_tokens[computes].tolist())
    for count, tokens in map(decodes_to_come, *reported):
        decodes += count
        kv_tokens += round(tokens)
    images = zip(*(view.column(name)[reporting].tolist() for name in ("images_used", "image_encode_ns")), strict=True)
    token_encode_ns = at_gateways.images_per_token * image_ns(images)
    return workload(
        engine,
        served=served,
        waiting_tokens=at_gateways_tokens + int(prompt_tokens.sum()),
        decodes=decodes,
        kv_tokens=kv_tokens,
        held=at_gateways.decode_requests,
        held_prompt_tokens=at_gateways.decode_prompt_tokens,
        tpot_ns=tpot_ns,
        prompt_tokens=at_gateways.mean_prompt_tokens,
        due_ns=due_ns,
        encode_ns=at_gateways_tokens * token_encode_ns + float(view.column("waiting_encode_ns")[reporting].sum()),
        held_encode_ns=at_gateways.decode_prompt_tokens * token_encode_ns,
    )


def _snapshot(view: FleetView, columns: _Columns) -> ClusterSnapshot:
    """Return all pools, including one for workers without a known role."""
    roster, pools = view.roster, []
    weighed_ns = columns.times_ns * roster.gpus[:, None]
    depths = np.stack([view.column(name) for name in ("running", "waiting", "waiting_prefill_tokens")], axis=1)
    for model, members in roster.models.items():
        roles = np.where(_has_role(columns.role[members]), columns.role[members], 0)
        for role in sorted(set(roles.tolist())):
            indices = members[roles == role]
            covered_ns, prefill_ns, decode_ns = weighed_ns[indices].sum(axis=0).tolist()
            running, waiting, prompt_tokens = depths[indices].sum(axis=0).tolist()
            gpus = int(roster.gpus[indices].sum())
            pools.append(
                RolePool(
                    model=model,
                    role=_ROLES[role] if role in ROLES else None,
                    workers=int(roster.counts[indices].sum()),
                    gpus=gpus,
                    busy=(prefill_ns + decode_ns) / covered_ns if covered_ns else None,
                    coverage=covered_ns / (gpus * view.window_ns),
                    running=running,
                    waiting=waiting,
                    waiting_prefill_tokens=prompt_tokens,
                )
            )
    whole = int(roster.gpus.sum()) * view.window_ns
    return ClusterSnapshot(
        window_ms=view.window_ns // 1_000_000,
        pools=tuple(pools),
        coverage=float(weighed_ns[:, COVERED].sum()) / whole if whole else 0.0,
        reporting=bool(columns.fresh.all()),
    )
