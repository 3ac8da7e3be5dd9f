"""The prompt phase: compute prompts in chunks, hold their KV blocks for whoever pulls them."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, Submit
from libs.engine.port import EngineRequest, Phase, SequenceOutput
from libs.policy.worker.slots import Room, prefill_slots
from libs.worker.wire import engine_request, sequence_event

WHOLE_CHUNK_TOKENS = 1 << 30
"""Nothing decodes here, so a step takes as much as the engine's own chunk size allows."""


class PrefillRole:
    """Plug-in for role prefill."""

    def request(self, submit: Submit, key: int, chain_root: bytes) -> EngineRequest:
        """The engine's request for a prompt; raises InvalidRequest with what is wrong."""
        return engine_request(submit, Phase.PREFILL, key, chain_root)

    def event(self, sequence: int, output: SequenceOutput) -> SequenceEvent | None:
        """Prefilled with the KV handle, or how the sequence ended without one."""
        return sequence_event(sequence, output)

    def prefill_budget(self, assignment: Assignment) -> int:
        """A whole chunk in every step, whatever the assignment."""
        return WHOLE_CHUNK_TOKENS

    def slots(self, assignment: Assignment, room: Room) -> tuple[int, int]:
        """Prompts only."""
        return prefill_slots(room), 0
