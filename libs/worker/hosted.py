from dataclasses import dataclass

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.worker.gateways.attached import AttachedGateway

PROMPT_PHASES = (pb.PHASE_PREFILL, pb.PHASE_BOTH)


@dataclass(slots=True)
class HostedSequence:
    """A gateway's sequence in the engine, and its progress."""

    gateway: AttachedGateway
    phase: pb.Phase
    request: EngineRequest
    budget_tokens: int = 0
    """The prompt budget at its admission. Its prompt is computed at no slower pace."""
    new_tokens: int = 0
    weighed: bool = False
    """Whether a hand-over has been weighed in the present role."""

    @property
    def tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far, wherever they were generated."""
        return self.tokens - self.request.prompt_tokens

    @property
    def most_tokens_left(self) -> int:
        """Number of output tokens that may still follow."""
        return self.request.max_output_tokens - self.output_tokens

    @property
    def yields(self) -> bool:
        """Whether its prompt waits while another's can be computed."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """Whether its prompt is to be computed here and is not finished."""
        return self.phase in PROMPT_PHASES and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """Whether its prompt is complete and it generates tokens here."""
        return self.phase != pb.PHASE_PREFILL and self.new_tokens > 0
