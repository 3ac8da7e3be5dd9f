"""One choice as its client sees it: tokens become text, stop strings end it, pieces wait until they can be sent."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason, Generation, unmade
from libs.engine.reports import Logprob
from libs.model.tokenizer import Decoder
from services.gateway.answers.parts import AnswerPart, PartKind
from services.gateway.answers.reader import AnswerReader, is_content
from services.gateway.dispatch.prompt_shown import PromptShown
from services.gateway.prompt.stops import StopMatcher


@dataclass(slots=True)
class TokenLogprob:
    """A token that came with its logprob; the first of a prompt has none."""

    token_id: int
    logprob: Logprob | None
    text_offset: int
    """Characters of the choice's text before it."""


@dataclass(slots=True)
class CallPiece:
    """A piece of a tool call."""

    index: int
    """Of the choice's calls, from 0."""
    id: str = ""
    """With its name, in the first piece of a call; empty in later ones."""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerRun(NamedTuple):
    """A part of an answer, in its place among the others."""

    kind: PartKind
    text: str
    call_id: str = ""
    """Of a call."""


@dataclass(slots=True)
class Piece:
    """What has come since the last piece was taken."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] | None = None
    calls: list[CallPiece] | None = None
    """None in place of empty lists, which most answers would make for each token."""
    finish: ApiFinishReason | None = None
    runs: list[AnswerRun] | None = None
    """The same parts in their order; None where nobody asks for it."""
    token_ids: list[int] | None = None
    """Of the tokens behind it; None where nobody asks for them."""

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.reasoning or self.calls or self.finish)


@dataclass(frozen=True, slots=True)
class PartReaders:
    """How an answer of more than content is read."""

    reader: AnswerReader
    reasons: bool
    """Whether its usage counts tokens of reasoning."""
    new_call_id: Callable[[str, int], str]
    """From a call's name and its place among the answer's calls."""
    max_calls: int
    """Calls beyond are dropped."""
    only_calls: bool = False
    """Nothing but calls may come: text before one that was cut off is a part of it, and not shown."""
    hides_reasoning: bool = False
    """Reasoning is counted, and not shown."""


class ChoiceText:
    """The sink of one generation.

    Tokens become text when a piece is taken: a client that reads slowly gets fewer and larger pieces, and at most the
    whole output waits. Only stop strings make every token be decoded as it comes, since one of them may be the last.
    """

    def __init__(
        self,
        *,
        request_id: str,
        decoder: Decoder,
        stops: Sequence[str],
        silent_token_ids: frozenset[int],
        min_tokens: int = 0,
        in_pieces: bool,
        parts: PartReaders | None = None,
        ordered: bool = False,
        prompt: PromptShown | None = None,
        changed: Callable[[], None],
    ) -> None:
        """`silent_token_ids`: they end the text and are no part of it. `min_tokens`: no stop string ends within the
        text of as many tokens, whichever workers they come from. `parts`: None where all of it is content;
        otherwise logprobs are of the content alone, and stop strings are looked for there. `ordered`: whether pieces
        say in which order their parts came. `prompt`: what is shown of it, and of tokens' ids. `changed` is called when
        all is there, and, for one who takes it `in_pieces`, when there may be a piece."""
        self.error: FulcrumError | None = None
        self.done = False
        self._request_id = request_id
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._silent = silent_token_ids
        self._min_tokens = min_tokens
        self._read_tokens = 0
        self._early = ""
        """Text of the first `min_tokens` tokens that the reader held back at their end."""
        self._in_pieces = in_pieces
        self._parts = parts
        self._kept: list[tuple[int, Logprob]] = []
        """Logprobs of tokens that may or may not be content."""
        self._calls = 0
        self._changed = changed
        self._tokens: list[tuple[int, Logprob | None]] = []
        self._chars = 0
        self._stopped = False
        self._ordered = ordered
        self.prompt = prompt
        self._echoes = prompt is not None and prompt.echo
        self._piece = self._empty()

    def _empty(self) -> Piece:
        piece = Piece(runs=[]) if self._ordered else Piece()
        if self.prompt is not None and self.prompt.ids:
            piece.token_ids = []
        return piece

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; None for a model that writes none."""
        parts = self._parts
        return parts.reader.reasoning_tokens if parts is not None and parts.reasons else None

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Take a token; True when a stop string ended the text."""
        if self.prompt is not None and self._shown(self.prompt, token_id, logprob):
            return False
        self._tokens.append((token_id, logprob))
        if self._has_stops:
            self._decode()
        if self._in_pieces:
            self._changed()
        return self._stopped

    def finish(self, reason: ApiFinishReason) -> None:
        """The last token was taken."""
        self._decode()
        if not self._stopped:
            parts = self._parts
            if self._push(self._decoder.flush()) if parts is None else self._end(parts):
                reason = ApiFinishReason.STOP
            else:
                self._add(self._stops.flush())
        if self.prompt is not None and self.prompt.only:
            reason = ApiFinishReason.LENGTH
        called = self._calls and reason is ApiFinishReason.STOP
        self._piece.finish = ApiFinishReason.TOOL_CALLS if called else reason
        self.done = True
        self._changed()

    def fail(self, error: FulcrumError) -> None:
        """No more will come."""
        self.error = error
        self.done = True
        self._changed()

    def take(self) -> Piece:
        """What is there to be sent. Should tokens fail to become text the choice fails, and its error is the news."""
        try:
            self._decode()
        except Exception as error:
            self._tokens.clear()
            self.fail(unmade(error, self._request_id))
        piece, self._piece = self._piece, self._empty()
        return piece

    def _shown(self, prompt: PromptShown, token_id: int, logprob: Logprob | None) -> bool:
        """Whether that was all: no token of the answer itself is wanted."""
        prompt.heard(logprob)
        if self._echoes:
            self._echoes = False
            self._echo(prompt)
        if prompt.ids and not prompt.only and self._piece.token_ids is not None:
            self._piece.token_ids.append(token_id)
        return prompt.only

    def _echo(self, prompt: PromptShown) -> None:
        """The prompt's text, ahead of the answer's, with its logprobs where there are some."""
        logprobs = (None, *prompt.logprobs) if prompt.scored else ()
        for place, text in enumerate(prompt.pieces()):
            if logprobs:
                self._piece.logprobs.append(TokenLogprob(prompt.token_ids[place], logprobs[place], self._chars))
            self._add(text)

    def _decode(self) -> None:
        if self._parts is None:
            self._show_all()
        else:
            self._read(self._parts)
        self._tokens.clear()

    def _show_all(self) -> None:
        for token_id, logprob in self._tokens:
            if logprob is not None:
                before = self._chars + self._stops.held_chars
                self._piece.logprobs.append(TokenLogprob(token_id, logprob, before))
            self._read_tokens += 1
            if token_id not in self._silent:
                self._push(self._decoder.push(token_id))

    def _read(self, parts: PartReaders) -> None:
        reader = parts.reader
        for token_id, logprob in self._tokens:
            self._read_tokens += 1
            if token_id in self._silent and not reader.is_special(token_id):
                continue
            found = reader.token(token_id)
            if logprob is not None and not reader.is_special(token_id):
                self._kept.append((token_id, logprob))
            if is_content(found):
                self._piece.logprobs += [TokenLogprob(*kept, self._chars) for kept in self._kept]
            if not reader.kept or is_content(found):
                self._kept.clear()
            self._sort(found, parts)
            if self._read_tokens == self._min_tokens:
                self._early = reader.held

    def _end(self, parts: PartReaders) -> bool:
        found = parts.reader.end()
        if is_content(found):
            self._piece.logprobs += [TokenLogprob(*kept, self._chars) for kept in self._kept]
        self._sort(found, parts)
        return self._stopped

    def _sort(self, found: Iterable[AnswerPart], parts: PartReaders) -> None:
        """Parts of the answer, in order; nothing follows a stop string."""
        for part in found:
            if self._stopped:
                return
            if part.kind is PartKind.CONTENT:
                if parts.only_calls:
                    continue
                self._push(part.text)
            elif part.kind is PartKind.REASONING:
                if parts.hides_reasoning:
                    continue
                if self._piece.reasoning is None:
                    self._piece.reasoning = []
                self._piece.reasoning.append(part.text)
                self._run(PartKind.REASONING, part.text)
            else:
                self._add_call(part, parts)

    def _add_call(self, part: AnswerPart, parts: PartReaders) -> None:
        if self._piece.calls is None:
            self._piece.calls = []
        calls = self._piece.calls
        if part.kind is PartKind.CALL:
            self._calls += 1
            if self._calls <= parts.max_calls:
                calls.append(CallPiece(self._calls - 1, parts.new_call_id(part.text, self._calls - 1), part.text))
                self._run(PartKind.CALL, part.text, calls[-1].id)
        elif self._calls <= parts.max_calls:
            if not calls:
                calls.append(CallPiece(self._calls - 1))
            calls[-1].arguments.append(part.text)
            self._run(PartKind.ARGUMENTS, part.text)

    def _push(self, text: str) -> bool:
        """Add content, up to a stop string where one may end there; whether one did."""
        # vLLM's detokenizer has the same rule, and searches from the text of token min_tokens + 1 on.
        exempt_chars = len(text) if self._read_tokens <= self._min_tokens else self._take_early(text)
        shown, self._stopped = self._stops.push(text, exempt_chars)
        self._add(shown)
        return self._stopped

    def _take_early(self, text: str) -> int:
        """Return how many characters of content come from the first `min_tokens` tokens after all."""
        for early in (self._early, self._early.lstrip()):  # readers drop white space after reasoning and calls
            if early and (text.startswith(early) or early.startswith(text)):
                self._early = early[len(text) :]
                return min(len(early), len(text))
        self._early = ""
        return 0

    def _add(self, text: str) -> None:
        if text:
            self._chars += len(text)
            self._piece.text.append(text)
            self._run(PartKind.CONTENT, text)

    def _run(self, kind: PartKind, text: str, call_id: str = "") -> None:
        if self._piece.runs is not None:
            self._piece.runs.append(AnswerRun(kind, text, call_id))


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt."""

    index: int
    generation: Generation
    text: ChoiceText


def first_error(choices: Iterable[Choice]) -> FulcrumError | None:
    """What one of them failed with; the others are of no use then."""
    return next((choice.text.error for choice in choices if choice.text.error is not None), None)
