"""The token phase: pull KV blocks, then go on token by token; with a budget, also prompts from start to end."""

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import PHASE_BOTH, PHASE_DECODE, SequenceEvent, Submit
from libs.engine.port import EngineRequest, Phase, SequenceOutput
from libs.policy.worker.slots import Room
from libs.worker.wire import engine_request, sequence_event

_PHASES = {PHASE_DECODE: Phase.DECODE, PHASE_BOTH: Phase.BOTH}


class DecodeRole:
    """Plug-in for role mixed, which is called decode where its budget is 0."""

    def request(self, submit: Submit, key: int, chain_root: bytes) -> EngineRequest:
        """The engine's request for a transferred or a whole sequence; raises InvalidRequest with what is wrong."""
        phase = _PHASES.get(submit.phase)
        if phase is None:
            raise InvalidRequest("the token phase takes phases decode and both")
        return engine_request(submit, phase, key, chain_root)

    def event(self, sequence: int, output: SequenceOutput) -> SequenceEvent | None:
        """When its KV is being pulled, and how the sequence ended."""
        return sequence_event(sequence, output)

    def prefill_budget(self, assignment: Assignment) -> int:
        """The assignment's: what the decodes' TPOT leaves room for."""
        return assignment.budget_tokens

    def slots(self, assignment: Assignment, room: Room) -> tuple[int, int]:
        """The running batch is the limit; a whole sequence takes a decode slot, where it spends nearly all its time."""
        return 0, room.max_sequences
