"""One sequence in the engine, as the worker host follows it."""

from dataclasses import dataclass

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.port import EngineRequest
from libs.worker.gateways.attached_gateway import AttachedGateway

PROMPT_PHASES = (pb.PHASE_PREFILL, pb.PHASE_BOTH)


@dataclass(slots=True)
class HostedSequence:
    """A gateway's sequence and how far it is."""

    gateway: AttachedGateway
    phase: pb.Phase
    request: EngineRequest
    budget_tokens: int = 0
    """Prompt tokens that a step might compute when it was taken: its prompt is computed at no slower pace."""
    new_tokens: int = 0
    """That came of it here."""
    weighed: bool = False
    """Whether a hand-over has been weighed, in the present role."""

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def output_tokens(self) -> int:
        """Output so far, wherever it was generated."""
        return self.tokens - self.request.prompt_tokens

    @property
    def most_tokens_left(self) -> int:
        """Output that may still come."""
        return self.request.max_output_tokens - self.output_tokens

    @property
    def yields(self) -> bool:
        """Whether its prompt waits while another's can be computed."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """Whether its prompt is computed here and is not yet."""
        return self.phase in PROMPT_PHASES and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """Whether it is past its prompt and goes on here, token by token."""
        return self.phase != pb.PHASE_PREFILL and self.new_tokens > 0
