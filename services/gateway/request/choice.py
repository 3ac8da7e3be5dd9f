"""One choice as its client sees it: decoded tokens, stop strings, and pieces that wait to be sent."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason, Generation, unmade
from libs.engine.reports import Logprob
from libs.model.tokenizer import Decoder, Tokenizer
from services.gateway.answers.parts import AnswerPart, AnswerReader, PartKind, is_content
from services.gateway.request.unchecked import AnswerRecord


@dataclass(slots=True)
class PromptShown:
    """The parts of the prompt that a choice's answer contains. Most answers contain none."""

    token_ids: Sequence[int]
    tokenizer: Tokenizer
    echo: bool = False
    """True if the text begins with the prompt's."""
    scored: bool = False
    """True if the request wants the prompt's logprobs."""
    only: bool = False
    """True if the request wants only the prompt; the one generated token is dropped."""
    ids: bool = False
    """True if the answer contains the token ids of the prompt and of itself."""
    total_logprob: float = 0.0
    scored_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """The logprobs of the prompt's second to last token, available with the first token of the answer."""

    def add_logprob(self, logprob: Logprob | None) -> None:
        if logprob is None:
            return
        if logprob.prompt:
            self.logprobs = logprob.prompt
        self.total_logprob += logprob.logprob
        self.scored_tokens += 1

    @property
    def mean_logprob(self) -> float:
        return self.total_logprob / max(self.scored_tokens, 1)

    def pieces(self) -> list[str]:
        """Return the text of each token; joined, the texts are the prompt's.

        A character that is spread over several tokens belongs to the last of them.
        """
        decoder = self.tokenizer.decoder()
        texts = [decoder.push(token_id) for token_id in self.token_ids]
        texts[-1] += decoder.flush()
        return texts


@dataclass(slots=True)
class TokenLogprob:
    """A token with its logprob, which the first token of a prompt lacks."""

    token_id: int
    logprob: Logprob | None
    text_offset: int
    """The number of characters of the choice's text before this token."""


@dataclass(slots=True)
class CallPiece:
    index: int
    """The call's index among the choice's calls, from 0."""
    id: str = ""
    """The call's id, sent with its name in the first piece; empty in later ones."""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerRun(NamedTuple):
    """A part of an answer, in its order among the others."""

    kind: PartKind
    text: str
    call_id: str = ""
    """The id of the call, if the part belongs to one."""


@dataclass(slots=True)
class Piece:
    """The output that has arrived since the last call of `take`."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] | None = None
    # None instead of empty lists, which most answers would create for each token.
    calls: list[CallPiece] | None = None
    finish: ApiFinishReason | None = None
    runs: list[AnswerRun] | None = None
    """The same parts in order; None unless the request wants their order."""
    token_ids: list[int] | None = None
    """The ids of the piece's tokens; None unless the request wants them."""

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.reasoning or self.calls or self.finish)


@dataclass(frozen=True, slots=True)
class PartReaders:
    """The parsers of an answer that has more than content."""

    reader: AnswerReader
    reasons: bool
    """True if usage reports the number of reasoning tokens."""
    new_call_id: Callable[[str, int], str]
    """A function that makes a call's id from its name and its index among the answer's calls."""
    max_calls: int
    """The bound on calls; further ones are dropped."""
    only_calls: bool = False
    """True if the answer consists only of calls. Text before a call that was cut off then belongs to it and is not
    shown.
    """
    hides_reasoning: bool = False
    """True if reasoning is counted but not shown."""


class ChoiceText:
    """A decoder of one choice's tokens to text, which also detects stop strings.

    Tokens are decoded in `take`. A client that reads slowly gets fewer and larger pieces, and at most the whole output
    waits. Only stop strings require decoding each token on arrival, since one of them may be the last.
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
        record: AnswerRecord | None = None,
        changed: Callable[[], None],
    ) -> None:
        """Create the text. `silent_token_ids` end the text and are not part of it. No stop string ends within the text
        of the first `min_tokens` tokens, whichever workers generate them.

        `parts` is None if the answer is all content; otherwise logprobs and stop strings concern only the content. With
        `ordered`, pieces record the order of their parts. `prompt` holds the shown parts of the prompt and of token
        ids. `record` gathers the whole answer.

        `changed` is called once the choice is complete and, with `in_pieces`, also whenever there may be a new piece.
        """
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
        """The text of the first `min_tokens` tokens that the parser still held back after the last of them."""
        self._in_pieces = in_pieces
        self._parts = parts
        self._kept: list[tuple[int, Logprob]] = []
        """The logprobs of tokens not yet known to be content."""
        self._calls = 0
        self._changed = changed
        self._tokens: list[tuple[int, Logprob | None]] = []
        self._chars = 0
        self._stopped = False
        self._ordered = ordered
        self.prompt = prompt
        self.record = record
        self._echoes = prompt is not None and prompt.echo
        self._piece = self._empty()

    def _empty(self) -> Piece:
        piece = Piece(runs=[]) if self._ordered else Piece()
        if self.prompt is not None and self.prompt.ids:
            piece.token_ids = []
        return piece

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens so far; None for a model that writes none."""
        parts = self._parts
        return parts.reader.reasoning_tokens if parts is not None and parts.reasons else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if the text ended in another way."""
        return self._stops.matched

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Add a token; return whether a stop string ended the text."""
        if self.prompt is not None and self._shown(self.prompt, token_id, logprob):
            return False
        self._tokens.append((token_id, logprob))
        if self._has_stops:
            self._decode()
        if self._in_pieces:
            self._changed()
        return self._stopped

    def finish(self, reason: ApiFinishReason) -> None:
        """End the choice after its last token."""
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
        self.error = error
        self.done = True
        self._changed()

    def take(self) -> Piece:
        """Return the output to be sent. If decoding fails, the choice fails and its error is set."""
        try:
            self._decode()
        except Exception as error:
            self._tokens.clear()
            self.fail(unmade(error, self._request_id))
        piece, self._piece = self._piece, self._empty()
        return piece

    def _shown(self, prompt: PromptShown, token_id: int, logprob: Logprob | None) -> bool:
        """Return whether the choice is complete, because the request wants only the prompt."""
        prompt.add_logprob(logprob)
        if self._echoes:
            self._echoes = False
            self._echo(prompt)
        if prompt.ids and not prompt.only and self._piece.token_ids is not None:
            self._piece.token_ids.append(token_id)
        return prompt.only

    def _echo(self, prompt: PromptShown) -> None:
        """Put the prompt's text, and its logprobs if there are any, before the answer's."""
        logprobs = (None, *prompt.logprobs) if prompt.scored else ()
        for place, text in enumerate(prompt.pieces()):
            if logprobs:
                self._piece.logprobs.append(TokenLogprob(prompt.token_ids[place], logprobs[place], self._chars))
            self._add(text)
        if self.record is not None:
            self.record.text.clear()

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
        """Distribute parts of the answer in order; drop those after a stop string."""
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
                if self.record is not None:
                    self.record.calls.append((part.text, []))
                calls.append(CallPiece(self._calls - 1, parts.new_call_id(part.text, self._calls - 1), part.text))
                self._run(PartKind.CALL, part.text, calls[-1].id)
        elif self._calls <= parts.max_calls:
            if not calls:
                calls.append(CallPiece(self._calls - 1))
            if self.record is not None:
                self.record.calls[-1][1].append(part.text)
            calls[-1].arguments.append(part.text)
            self._run(PartKind.ARGUMENTS, part.text)

    def _push(self, text: str) -> bool:
        """Add content up to a stop string; return whether one ended the text."""
        # vLLM's detokenizer has the same rule, and searches from the text of token min_tokens + 1.
        exempt_chars = len(text) if self._read_tokens <= self._min_tokens else self._take_early(text)
        shown, self._stopped = self._stops.push(text, exempt_chars)
        self._add(shown)
        return self._stopped

    def _take_early(self, text: str) -> int:
        """Return the number of characters of `text` that come from the first `min_tokens` tokens."""
        for early in (self._early, self._early.lstrip()):  # parsers drop white space after reasoning and calls
            if early and (text.startswith(early) or early.startswith(text)):
                self._early = early[len(text) :]
                return min(len(early), len(text))
        self._early = ""
        return 0

    def _add(self, text: str) -> None:
        if text:
            self._chars += len(text)
            self._piece.text.append(text)
            if self.record is not None:
                self.record.text.append(text)
            self._run(PartKind.CONTENT, text)

    def _run(self, kind: PartKind, text: str, call_id: str = "") -> None:
        if self._piece.runs is not None:
            self._piece.runs.append(AnswerRun(kind, text, call_id))


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    generation: Generation
    text: ChoiceText
    tools_as_text: bool = False
    """True if the prompt holds tools, calls or results as text; the answer then reports it."""


def first_error(choices: Iterable[Choice]) -> FulcrumError | None:
    """Return the first error among choices of one request; the other choices are useless after it."""
    return next((choice.text.error for choice in choices if choice.text.error is not None), None)


class StopMatcher:
    """A matcher that finds the stop string completed first, however the text is divided into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def held_chars(self) -> int:
        """Return the number of characters held back because they may begin a stop string."""
        return len(self._held)

    def push(self, text: str, exempt_chars: int = 0) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop string ended it.

        A stop string that ends within the first `exempt_chars` of `text` does not count; one that begins there and
        ends later does.
        """
        if not self._stops:
            return text, False
        searched = len(self._held) + exempt_chars
        text = self._held + text
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(searched + 1 - len(stop), 0))) >= 0
        ]
        if found:
            self._held = ""
            _, at, self.matched = min(found)
            return text[:at], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """Return the text held back, once no more follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
