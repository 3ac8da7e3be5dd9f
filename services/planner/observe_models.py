"""What a model's workers can do and have to do, from what they and gateways say: what roles are decided from. Pure."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_PREFILL, WORKER_STATE_READY, StepTime
from libs.perfmodel.learner import StepKind, combine
from libs.perfmodel.wire import fitted_model
from libs.policy.planner.assigning import Standing
from libs.policy.planner.capacity import Engine, Work
from libs.policy.planner.demand import decodes_to_come, prompts_wanted
from libs.policy.roles import MAX_BUDGET_TOKENS, Role
from libs.policy.step_time import StepTimeModel
from libs.telemetry.gateways import Waiting
from services.planner.observe import ROLES, ObservedWorker, by_planner

FRESH_NS: Final = 2_000_000_000
"""Workers tell at least three times a second: what one said longer ago is not what it has now."""
HEARD_SHARE: Final = 0.5
"""Of a model's workers that take work: with fewer that are heard nothing is decided about it."""
LEAST_NS: Final = 1.0
"""For a step of anything: models that say less are none."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What a worker's newest batch says that its fleet does not keep."""

    incarnation: int
    at_ns: int
    """When it came, by this process's clock."""
    step_time: StepTime | None


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A model's workers; where `engine` is None, `unknown` says what is missing."""

    model: str
    engine: Engine | None
    work: Work
    standings: Sequence[Standing]
    unknown: str = ""


def observe_models(
    observed: Iterable[ObservedWorker],
    heard: Mapping[str, Heard],
    waiting: Mapping[str, Waiting] | None,
    *,
    tpot_ns: Callable[[str], int],
    now_ns: int,
    unpaired: Iterable[str] = (),
    pinned: Container[str] = (),
    planner_id: str = "",
) -> list[ObservedModel]:
    """Every model that has workers with a role. `waiting`: at gateways, None where those are not heard; `unpaired`:
    workers that get no work wherever they stand; `tpot_ns`: the target of a model."""
    alone = frozenset(unpaired)
    by_model: dict[str, list[ObservedWorker]] = {}
    for each in observed:
        if each.assignment.role in ROLES:
            by_model.setdefault(each.assignment.model, []).append(each)
    found = []
    for model, workers in sorted(by_model.items()):
        fresh = {each.worker.id for each in workers if _is_heard(each, heard.get(each.worker.id), now_ns)}
        there = [each for each in workers if each.worker.id in fresh]
        movable = fresh - alone
        standings = [
            _standing(
                each,
                movable=each.worker.id in movable,
                pinned=each.worker.id in pinned,
                keeps_budget=not by_planner(each.worker, planner_id),
            )
            for each in workers
        ]
        engine = _engine(there, [heard[each.worker.id].step_time for each in there])
        unknown = _unheard(workers, fresh) or (engine if isinstance(engine, str) else "")
        if waiting is None:
            unknown = unknown or "no gateway says what waits there"
        if unknown or isinstance(engine, str):
            found.append(ObservedModel(model, None, Work(0.0, 0, 0, tpot_ns(model)), standings, unknown))
        else:
            at_gateways = (waiting or {}).get(model, Waiting())
            found.append(ObservedModel(model, engine, _work(engine, there, at_gateways, tpot_ns(model)), standings))
    return found


def _is_heard(observed: ObservedWorker, heard: Heard | None, now_ns: int) -> bool:
    if heard is None or observed.load is None:
        return False
    return heard.incarnation == observed.worker.incarnation and heard.at_ns > now_ns - FRESH_NS


def _unheard(workers: Sequence[ObservedWorker], fresh: set[str]) -> str:
    ready = [each.worker.id for each in workers if each.worker.state == WORKER_STATE_READY]
    count = sum(name in fresh for name in ready)
    return "" if count >= max(len(ready) * HEARD_SHARE, 1) else f"{count} of {len(ready)} workers are heard"


def _standing(observed: ObservedWorker, *, movable: bool, pinned: bool, keeps_budget: bool) -> Standing:
    return Standing(
        id=observed.worker.id,
        role=Role(observed.assignment.role),
        budget_tokens=observed.assignment.budget_tokens,
        movable=movable and observed.worker.state == WORKER_STATE_READY,
        prompt_tokens=observed.load.waiting_prefill_tokens if observed.load else 0,
        kv_tokens=_kv_tokens(observed),
        pinned=pinned,
        keeps_budget=keeps_budget,
    )


def _kv_tokens(observed: ObservedWorker) -> int:
    """That its sequences hold."""
    can = observed.worker.capabilities
    free = observed.load.free_kv_blocks if observed.load else can.kv_blocks
    return max(can.kv_blocks - free, 0) * can.block_size_tokens


def _engine(workers: Sequence[ObservedWorker], told: Sequence[StepTime | None]) -> Engine | str:
    """That of the weakest in each respect, or what is missing: a change must not ask too much of anyone."""
    abilities = [each.worker.capabilities for each in workers]
    chunks = [can.chunk_tokens for can in abilities if can.chunk_tokens]
    sequences = [can.max_sequences for can in abilities if can.max_sequences]
    model = _step_time([each for each in told if each is not None])
    if model is None:
        return "no worker has said how long its steps take"
    if not chunks or not sequences:
        return "no worker has said how many tokens and sequences a step takes"
    kv_tokens = min(can.kv_blocks * can.block_size_tokens for can in abilities)
    return Engine(model, min(*chunks, MAX_BUDGET_TOKENS), min(sequences), kv_tokens)


def _step_time(told: Sequence[StepTime]) -> StepTimeModel | None:
    """Each part from the worker that has seen most steps of its kind: those in one role know little of the other."""
    base = next((fitted for fitted in map(fitted_model, told) if fitted is not None), None)
    if base is None:
        return None
    fits = {}
    for kind in StepKind:
        most = max(told, key=lambda each: int(getattr(each, kind.value).steps))
        fitted = fitted_model(most) if getattr(most, kind.value).steps else None
        if fitted is not None:
            fits[kind] = fitted
    model = combine(base.model, fits)
    sane = min(model.chunks_ns(1, 1), model.decode_fixed_ns + model.decode_sequence_ns) >= LEAST_NS
    return model if sane else None


def _work(engine: Engine, workers: Iterable[ObservedWorker], at_gateways: Waiting, tpot_ns: int) -> Work:
    """All that was computed of late, runs, or waits, here or at gateways."""
    served, decodes, kv_tokens = 0.0, 0, 0
    prompt_tokens = at_gateways.hopeful_tokens  # whoever is late already is served by what others leave
    for each in workers:
        load, time = each.load, each.time
        if load is None:
            continue
        served += time.prefill_ns / time.covered_ns if time.covered_ns else 0.0
        prompt_tokens += load.waiting_prefill_tokens
        if each.assignment.role == ROLE_PREFILL:
            count, tokens = decodes_to_come(load.running, load.waiting, load.waiting_prefill_tokens)
        else:
            queued = 0 if load.waiting_prefill_tokens else load.waiting  # else they are prompts
            count, tokens = load.running + queued + load.awaiting_kv, _kv_tokens(each)
        decodes += count
        kv_tokens += round(tokens)
    if at_gateways.decode_requests:
        alike = kv_tokens // decodes if decodes else 0  # gateways do not say what is computed already
        kv_tokens += max(at_gateways.decode_prompt_tokens, at_gateways.decode_requests * alike)
        decodes += at_gateways.decode_requests
    waiting_ns = prompt_tokens / engine.chunk_speed()
    return Work(prompts_wanted(served, waiting_ns), decodes, kv_tokens, tpot_ns, waiting_ns)
