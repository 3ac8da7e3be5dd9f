"""One sequence on a worker of the lab, as its host follows it."""

from dataclasses import dataclass

from libs.engine.port import EnginePhase
from libs.lab.cluster.sequence import CountedRequest


@dataclass(slots=True)
class LabSequence:
    """A sequence and how far it is."""

    request: CountedRequest
    budget_tokens: int = 0
    """The role's when it was taken."""
    new_tokens: int = 0
    """That came of it here."""
    weighed: bool = False
    """Whether it has been weighed for leaving, in the present role."""

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def most_tokens_left(self) -> int:
        """Output that may still come."""
        return self.request.max_output_tokens - (self.tokens - self.request.prompt_tokens)

    @property
    def yields(self) -> bool:
        """Whether its prompt waits while another's can be computed."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """Whether its prompt is computed here and is not yet."""
        return self.request.phase is not EnginePhase.DECODE and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """Whether it is past its prompt and goes on here, token by token."""
        return self.request.phase is not EnginePhase.PREFILL and self.new_tokens > 0
