"""The host's view of one sequence on a simulated worker."""

from dataclasses import dataclass

from libs.engine.port import EnginePhase
from libs.lab.cluster.sequence import CountedRequest


@dataclass(slots=True)
class LabSequence:
    """A sequence on a worker with its progress."""

    request: CountedRequest
    budget_tokens: int = 0
    """The role's prompt budget when the sequence was accepted."""
    new_tokens: int = 0
    """Output tokens produced since the sequence came to this worker."""
    weighed: bool = False
    """Whether moving the sequence has been considered under the present role."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.request.token_ids) + self.new_tokens

    @property
    def most_tokens_left(self) -> int:
        """The most output tokens that may still come."""
        return self.request.max_output_tokens - (self.tokens - self.request.prompt_tokens)

    @property
    def yields(self) -> bool:
        """Whether its prompt gives way to others that can be computed."""
        return self.request.yields

    @property
    def awaits_prompt(self) -> bool:
        """Whether its prompt is computed here and is still incomplete."""
        return self.request.phase is not EnginePhase.DECODE and not self.new_tokens

    @property
    def decodes(self) -> bool:
        """Whether it is past its prompt and continues here token by token."""
        return self.request.phase is not EnginePhase.PREFILL and self.new_tokens > 0
