"""Admission of submitted sequences: libs/policy decides, and this module converts to and from protobuf."""

from collections.abc import Collection
from typing import assert_never

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import chain_root
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.policy.roles import Refusal
from libs.policy.worker.assignment import Invalid, WorkerReadiness, invalid, refusal
from libs.worker.roles import AssignmentState
from libs.worker.wire import engine_request

_CODES = {
    Refusal.STALE_ROLE: pb.REFUSAL_CODE_STALE_ROLE,
    Refusal.NO_CAPACITY: pb.REFUSAL_CODE_NO_CAPACITY,
    Refusal.DRAINING: pb.REFUSAL_CODE_DRAINING,
    Refusal.INVALID: pb.REFUSAL_CODE_INVALID,
    Refusal.KV_MISMATCH: pb.REFUSAL_CODE_KV_MISMATCH,
}


def admit(
    submit: pb.Submit,
    *,
    assignment: AssignmentState,
    has_credit: bool,
    sequence_id: int,
    model_revision: str,
    kv_layout: str,
    adapters: Collection[str] = (),
    loads_adapters: bool = False,
) -> EngineRequest | pb.Refused:
    """Return the engine's request for `submit`, or the refusal.

    With `loads_adapters`, the engine also loads adapters beyond `adapters` if a sequence names their folder.
    """
    model = assignment.current.model
    wrong = invalid(
        submit.phase,
        submit.model,
        submit.adapter,
        worker_model=model,
        adapters=adapters,
        loadable=loads_adapters and bool(submit.adapter_source),
    )
    if wrong is not None:
        return refusal_message(Refusal.INVALID, _invalid_detail(wrong, model, submit))
    root = chain_root(
        model_revision=model_revision,
        kv_layout=kv_layout,
        adapter=submit.adapter,
        tenant_salt=submit.context.cache_salt or submit.context.tenant,
    )
    try:
        request = engine_request(submit, sequence_id, root)
    except InvalidRequest as error:
        return refusal_message(Refusal.INVALID, error.message)
    blocks_layout = request.kv.kv_layout if request.kv else None
    code = refusal(
        submit.phase,
        blocks_layout,
        WorkerReadiness(assignment.current, assignment.draining, kv_layout, has_credit),
    )
    return request if code is None else refusal_message(code, _detail(code, blocks_layout, kv_layout))


def refusal_message(code: Refusal, detail: str) -> pb.Refused:
    return pb.Refused(code=_CODES[code], detail=detail)


def _invalid_detail(wrong: Invalid, model: str, submit: pb.Submit) -> str:
    match wrong:
        case Invalid.PHASE_MISSING:
            return "phase is missing"
        case Invalid.OTHER_MODEL:
            return f"this worker has model {model!r}"
        case Invalid.ADAPTER:
            why = ": its engine loads none while it runs" if submit.adapter_source else ""
            return f"this worker has no adapter {submit.adapter!r}{why}: name it in FULCRUM_WORKER_ADAPTERS"
        case _:
            assert_never(wrong)


def _detail(code: Refusal, blocks_layout: str | None, kv_layout: str) -> str:
    if code is Refusal.KV_MISMATCH:
        return f"the blocks have KV layout {blocks_layout!r}, this engine has {kv_layout!r}"
    if code is Refusal.NO_CAPACITY:
        return "no credit was held"
    return "the phase does not fit the worker's assignment"
