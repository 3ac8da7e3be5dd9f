"""The prompt phase: compute prompts in chunks, hold their KV blocks for whoever pulls them."""

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SequenceEvent, Submit
from libs.engine.port import EngineRequest, Phase, SequenceOutput
from libs.worker.roles.port import Room
from libs.worker.wire import engine_request, sequence_event

MIN_PROMPTS, MAX_PROMPTS = 4, 64
"""Prompts at the worker at once. The rest wait in the gateways, where they can still go elsewhere."""
FILLED_STEPS = 2
"""Of short prompts as many as fill the running step and the next one, and what is computed in `HAND_OVER_S`."""
HAND_OVER_S = 0.1
"""From the end of a prompt until the gateway's next one is here: 1 ms, but tens where cores are busy. What comes too
late for a step is missing in it, and a worker that runs half-empty steps has less than its plateau. Ample, since
prompts differ in length: a mean's worth of them often holds less."""
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
        """A few prompts, more of short ones, no decodes. In powers of two: a new mean is seldom another number.

        Never more than the engine has places for: what decodes on from another role has its own until it ends or moves,
        and meanwhile a prompt waits better in its gateway. With no place none is taken: decodes need no prompt to end.
        """
        wanted_tokens = room.chunk_tokens * (FILLED_STEPS + HAND_OVER_S / room.step_s)
        prompts = MIN_PROMPTS
        while prompts < MAX_PROMPTS and prompts * room.prompt_tokens < wanted_tokens:
            prompts *= 2
        return min(prompts, max(room.max_sequences - room.decoding, 0)), 0
