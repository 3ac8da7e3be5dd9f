"""Conversion of models' assessments to and from protobuf. Metrics services publish them with the loads of workers."""

from collections.abc import Iterable, Mapping
from itertools import islice
from math import isfinite
from types import MappingProxyType
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import AdvisedRoles, AssessedWork, ModelAssessment
from libs.contracts.roles import role_from_name
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.wire import fitted_model, step_time_message
from libs.policy.pressure import Split, WorkerProfile, Workload
from libs.policy.verdict.advice import Action
from libs.policy.verdict.assessment import MOST_PRESSURE, Assessment

FRESH_NS: Final = 2_000_000_000
"""The age from which an assessment is outdated."""
MAX_ASSESSED: Final = 64
_UNFITTED: Final = KindFit(steps=0)


def assessment_message(found: Assessment) -> ModelAssessment:
    engine, work, standing = found.engine, found.work, found.standing
    message = ModelAssessment(
        model=found.model,
        prefill=standing.prefill,
        decode=standing.mixed,
        prefill_pressure=standing.prompt_pressure,
        decode_pressure=standing.decode_pressure,
        work=AssessedWork(
            prompts=min(work.prompts, MOST_PRESSURE * max(standing.prefill + standing.mixed, 1)),
            decodes=work.decodes,
            kv_tokens=work.kv_tokens,
            tpot_ns=work.tpot_ns,
            waiting_ns=work.waiting_ns,
            held=work.held,
            held_kv_tokens=work.held_kv_tokens,
            held_prompts=work.held_prompts,
        ),
        step_time=step_time_message(FittedModel(engine.step_time, _UNFITTED, _UNFITTED, _UNFITTED)),
        chunk_tokens=engine.chunk_tokens,
        max_sequences=engine.max_sequences,
        kv_tokens=engine.kv_tokens,
        missing_workers=found.missing_workers,
    )
    if found.action is not None:
        message.advised.CopyFrom(_advised_message(found.action, found))
    return message


def assessments_of(messages: Iterable[ModelAssessment]) -> Mapping[str, Assessment]:
    """Decode the assessments of one message by model; invalid ones are left out."""
    found = map(_assessment, islice(messages, MAX_ASSESSED))
    return MappingProxyType({each.model: each for each in found if each is not None})


def _assessment(message: ModelAssessment) -> Assessment | None:
    fitted = fitted_model(message.step_time)
    pressures = message.prefill_pressure, message.decode_pressure
    work = message.work
    if fitted is None or not message.chunk_tokens or not all(map(isfinite, (*pressures, work.prompts))):
        return None
    return Assessment(
        message.model,
        WorkerProfile(fitted.model, message.chunk_tokens, message.max_sequences, message.kv_tokens),
        Workload(
            work.prompts,
            work.decodes,
            work.kv_tokens,
            work.tpot_ns,
            work.waiting_ns,
            held=work.held,
            held_kv_tokens=work.held_kv_tokens,
            held_prompts=work.held_prompts,
        ),
        Split(message.prefill, message.decode, *pressures),
        message.missing_workers,
        _action(message.advised) if message.HasField("advised") else None,
        message.advised.cause,
        message.advised.reason,
    )


def _advised_message(action: Action, found: Assessment) -> AdvisedRoles:
    role, budget_tokens = role_from_name(action.role, action.budget_tokens)
    return AdvisedRoles(
        advice_id=action.id,
        since_unix_ns=action.since_ns,
        worker_ids=action.workers,
        role=role,
        budget_tokens=budget_tokens,
        cause=found.code,
        reason=found.sentence,
        pressure_then=min(action.pressure_then, MOST_PRESSURE),
    )


def _action(message: AdvisedRoles) -> Action:
    decodes = "mixed" if message.budget_tokens else "decode"
    return Action(
        tuple(message.worker_ids),
        decodes if message.role == ROLE_MIXED else "prefill",
        message.budget_tokens,
        message.pressure_then,
        id=message.advice_id,
        since_ns=message.since_unix_ns,
    )
