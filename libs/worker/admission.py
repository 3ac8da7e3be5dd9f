"""Whether a worker takes a submitted sequence, and as what. Pure."""

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import chain_root
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.worker.assignment import AssignmentState
from libs.worker.wire import engine_request

PHASES = (pb.PHASE_PREFILL, pb.PHASE_DECODE, pb.PHASE_BOTH)


def admit(
    submit: pb.Submit,
    *,
    assignment: AssignmentState,
    has_credit: bool,
    key: int,
    model_revision: str,
    kv_layout: str,
) -> EngineRequest | pb.Refused:
    """The engine's request for `submit`, or why it is refused: first what no worker would take, then what this one
    does not take now."""
    if submit.phase not in PHASES:
        return pb.Refused(code=pb.REFUSAL_CODE_INVALID, detail="phase is missing")
    model = assignment.current.model
    if submit.model != model:
        return pb.Refused(code=pb.REFUSAL_CODE_INVALID, detail=f"this worker has model {model!r}")
    if submit.adapter:
        return pb.Refused(code=pb.REFUSAL_CODE_INVALID, detail="adapters are not served")
    root = chain_root(
        model_revision=model_revision,
        kv_layout=kv_layout,
        adapter=submit.adapter,
        tenant_salt=submit.context.tenant,
    )
    try:
        request = engine_request(submit, key, root)
    except InvalidRequest as error:
        return pb.Refused(code=pb.REFUSAL_CODE_INVALID, detail=error.message)
    code = assignment.refusal(submit.phase)
    if code is not None:
        return pb.Refused(code=code, detail="the phase does not fit the worker's assignment")
    if request.kv is not None and request.kv.kv_layout != kv_layout:
        detail = f"the blocks have KV layout {request.kv.kv_layout!r}, this engine has {kv_layout!r}"
        return pb.Refused(code=pb.REFUSAL_CODE_KV_MISMATCH, detail=detail)
    if not has_credit:
        return pb.Refused(code=pb.REFUSAL_CODE_NO_CAPACITY, detail="no credit was held")
    return request
