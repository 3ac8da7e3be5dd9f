"""Whether a worker takes a submitted sequence, and as what. Pure."""

from dataclasses import dataclass

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import chain_root
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.worker.assignment import AssignmentState
from libs.worker.roles.port import Role

PHASES = (pb.PHASE_PREFILL, pb.PHASE_DECODE, pb.PHASE_BOTH)


@dataclass(frozen=True, slots=True)
class Roles:
    """The role plug-ins that every worker carries."""

    prefill: Role
    token: Role

    def of_phase(self, phase: pb.Phase) -> Role:
        """The plug-in that does `phase`."""
        return self.prefill if phase == pb.PHASE_PREFILL else self.token

    def of_assignment(self, assignment: common.Assignment) -> Role | None:
        """The plug-in behind an assignment; None for standby."""
        if assignment.role == common.ROLE_PREFILL:
            return self.prefill
        return self.token if assignment.role == common.ROLE_MIXED else None


def admit(
    submit: pb.Submit,
    *,
    assignment: AssignmentState,
    roles: Roles,
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
        request = roles.of_phase(submit.phase).request(submit, key, root)
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
