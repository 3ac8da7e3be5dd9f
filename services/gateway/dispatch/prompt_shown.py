"""The parts of a prompt that an answer shows: echo, logprobs and token ids. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from libs.engine.reports import Logprob
from libs.model.tokenizer import Tokenizer


@dataclass(slots=True)
class PromptShown:
    """What one choice shows of its prompt. Most choices have none."""

    token_ids: Sequence[int]
    """The token ids of the prompt."""
    tokenizer: Tokenizer
    echo: bool = False
    """Whether the text begins with the prompt's."""
    scored: bool = False
    """Whether the request wants the prompt's logprobs."""
    only: bool = False
    """Whether the request wants the prompt alone; the one token that is generated is dropped."""
    ids: bool = False
    """Whether the ids of prompt and answer are shown."""
    total_logprob: float = 0.0
    """The sum of the answer's logprobs so far."""
    heard_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """The logprobs of the prompt's second to last token, available with the first token of the answer."""

    def heard(self, logprob: Logprob | None) -> None:
        """Record the logprob of the answer's next token."""
        if logprob is None:
            return
        if logprob.prompt:
            self.logprobs = logprob.prompt
        self.total_logprob += logprob.logprob
        self.heard_tokens += 1

    @property
    def mean_logprob(self) -> float:
        """Return the mean logprob of the answer's tokens."""
        return self.total_logprob / max(self.heard_tokens, 1)

    def pieces(self) -> list[str]:
        """Return the text of each token; joined, the texts are the prompt's.

        The bytes of a character spread over several tokens are given to the last of them.
        """
        decoder = self.tokenizer.decoder()
        texts = [decoder.push(token_id) for token_id in self.token_ids]
        texts[-1] += decoder.flush()
        return texts
