"""What an answer shows of its prompt, and of its tokens by id: echo, logprobs of the prompt, ids. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from libs.engine.reports import Logprob
from libs.model.tokenizer import Tokenizer


@dataclass(slots=True)
class PromptShown:
    """Of one choice. Most choices have none of it."""

    token_ids: Sequence[int]
    """The prompt's."""
    tokenizer: Tokenizer
    echo: bool = False
    """Whether the text begins with the prompt's."""
    scored: bool = False
    """Whether the prompt's logprobs are wanted."""
    only: bool = False
    """Whether nothing is wanted beyond them: the one token that is generated is dropped."""
    ids: bool = False
    """Whether the ids of prompt and answer are shown."""
    total_logprob: float = 0.0
    """Of the answer's tokens so far."""
    heard_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """Of the prompt's second to last token, once the first token of the answer is there."""

    def heard(self, logprob: Logprob | None) -> None:
        """A token came with this."""
        if logprob is None:
            return
        if logprob.prompt:
            self.logprobs = logprob.prompt
        self.total_logprob += logprob.logprob
        self.heard_tokens += 1

    @property
    def mean_logprob(self) -> float:
        """Of the answer's tokens."""
        return self.total_logprob / max(self.heard_tokens, 1)

    def pieces(self) -> list[str]:
        """Text of each token, which join to the prompt's; bytes of a character stand with the last of its tokens."""
        decoder = self.tokenizer.decoder()
        texts = [decoder.push(token_id) for token_id in self.token_ids]
        texts[-1] += decoder.flush()
        return texts
