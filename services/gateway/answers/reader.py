"""Conversion of an answer's tokens into its parts. Pure."""

from collections.abc import Mapping

from libs.model.tokenizer import Decoder
from services.gateway.answers.parts import AnswerPart, Parser, PartKind


class AnswerReader:
    """The reader of one answer. Ordinary tokens become text; special tokens are the format's markers."""

    def __init__(self, parser: Parser, decoder: Decoder, special_tokens: Mapping[int, str]) -> None:
        """`special_tokens` maps ids to texts."""
        self._parser = parser
        self._decoder = decoder
        self._special = special_tokens
        self.reasoning_tokens = 0
        self.kept = False
        """Whether later tokens decide if the last token is content."""

    @property
    def held(self) -> str:
        """Return the text held back until more of it arrives; it may still become content."""
        return self._parser.held

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token(self, token_id: int) -> list[AnswerPart]:
        self.reasoning_tokens += self._parser.thinking
        special = self._special.get(token_id)
        if special is None:
            text = self._decoder.push(token_id)
            parts = self._parser.text(text) if text else []
            self.kept = not text or bool(self._parser.held)
            return parts
        parts = self._flush()
        self.kept = False
        return parts + self._parser.special(special)

    def end(self) -> list[AnswerPart]:
        """End the answer and return the parts of the text that was held back."""
        return self._flush() + self._parser.end()

    def _flush(self) -> list[AnswerPart]:
        text = self._decoder.flush()
        return self._parser.text(text) if text else []


def is_content(parts: list[AnswerPart]) -> bool:
    """Return whether any of the parts is shown as content."""
    return any(part.kind is PartKind.CONTENT for part in parts)
