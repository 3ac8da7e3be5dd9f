"""One choice of a request, with its decoded tokens, stop strings, and the output that waits to be sent."""

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
    """The parts of the prompt that one choice returns with its answer. Most requests ask for none."""

    token_ids: Sequence[int]
    tokenizer: Tokenizer
    echo: bool = False
    """True if the answer's text begins with the prompt's text."""
    scored: bool = False
    """True if the answer includes the prompt's logprobs."""
    only: bool = False
    """True if the client requested no tokens after the prompt. Workers generate at least one, which is dropped."""
    ids: bool = False
    """True if the answer includes the token ids of the prompt and of the output."""
    total_logprob: float = 0.0
    scored_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    """The logprobs of the second to last prompt tokens. They arrive with the first output token."""

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
        """Return the text of each prompt token. The joined texts equal the prompt.

        A character that is spread over several tokens belongs to the last of them.
        """
        decoder = self.tokenizer.decoder()
        texts = [decoder.push(token_id) for token_id in self.token_ids]
        texts[-1] += decoder.flush()
        return texts


@dataclass(slots=True)
class TokenLogprob:
    """A token and its logprob, which is None for a prompt's first token."""

    token_id: int
    logprob: Logprob | None
    text_offset: int
    """The number of characters in the choice's text before this token."""


@dataclass(slots=True)
class CallPiece:
    index: int
    """The index of the call among the choice's calls, from 0."""
    id: str = ""
    """The id of the call. The first piece contains the id and the name; in later pieces both are empty."""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerRun(NamedTuple):
    """A stretch of the answer of one kind, in the order in which the model wrote it."""

    kind: PartKind
    text: str
    call_id: str = ""
    """The id of the tool call for kind CALL; otherwise empty."""


@dataclass(slots=True)
class Piece:
    """The output that has arrived since the last call of `ChoiceText.take`."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reasoning: list[str] | None = None
    # None instead of empty lists, because most answers would create two lists for each token.
    calls: list[CallPiece] | None = None
    finish: ApiFinishReason | None = None
    runs: list[AnswerRun] | None = None
    """All parts of the piece in the order of the answer; None if the client does not need the order."""
    token_ids: list[int] | None = None
    """The ids of the piece's tokens; None if the client did not request them."""

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.reasoning or self.calls or self.finish)


@dataclass(frozen=True, slots=True)
class PartReaders:
    """The parser and settings for answers with reasoning or tool calls."""

    reader: AnswerReader
    reasons: bool
    """True if usage reports the number of reasoning tokens."""
    new_call_id: Callable[[str, int], str]
    """A function that creates the id of a call, given its name and its index in the answer."""
    max_calls: int
    """The maximum number of calls. Further ones are dropped."""
    only_calls: bool = False
    """True if the answer consists of tool calls only.

    Content is then dropped, because it can only be the text of a call that was cut off.
    """
    hides_reasoning: bool = False
    """True if reasoning is counted in usage but not sent."""


class ChoiceText:
    """A decoder that turns one choice's tokens into text and searches it for stop strings.

    Tokens are decoded only when `take` is called. If the client reads slowly, it gets fewer and larger pieces, and at
    most the whole output waits in memory. With stop strings, each token is decoded on arrival, because it may be the
    last.
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
        """Create the text. `silent_token_ids` end the text and are not part of it. Stop strings that end within the
        text of the first `min_tokens` tokens are ignored.

        `parts` is None if the whole answer is content. Otherwise stop strings and logprobs apply to content only. With
        `ordered`, each piece records the order of its parts. `prompt` says which parts of the prompt are returned.
        `record` collects the answer for a check of its schema.

        `changed` is called when the choice is complete. With `in_pieces`, it is also called whenever a new piece may be
        available.
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
        """Content of the first `min_tokens` tokens that the parser returns only after later tokens."""
        self._in_pieces = in_pieces
        self._parts = parts
        self._kept: list[tuple[int, Logprob]] = []
        """The tokens and logprobs that later tokens may turn into content."""
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
        """The number of reasoning tokens so far; None if the model does not reason."""
        parts = self._parts
        return parts.reader.reasoning_tokens if parts is not None and parts.reasons else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if the text ended for another reason."""
        return self._stops.matched

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Add a token. Return True if the choice needs no further tokens because of a stop string."""
        if self.prompt is not None and self._shown(self.prompt, token_id, logprob):
            return False
        self._tokens.append((token_id, logprob))
        if self._has_stops:
            self._decode()
        if self._in_pieces:
            self._changed()
        return self._stopped

    def finish(self, reason: ApiFinishReason) -> None:
        """Complete the choice after its last token."""
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
        """Return the output since the last call. If decoding raises, the choice fails and `error` is set."""
        try:
            self._decode()
        except Exception as error:
            self._tokens.clear()
            self.fail(unmade(error, self._request_id))
        piece, self._piece = self._piece, self._empty()
        return piece

    def _shown(self, prompt: PromptShown, token_id: int, logprob: Logprob | None) -> bool:
        """Handle the parts of the prompt for one output token.

        Return True if the token itself is not part of the answer.
        """
        prompt.add_logprob(logprob)
        if self._echoes:
            self._echoes = False
            self._echo(prompt)
        if prompt.ids and not prompt.only and self._piece.token_ids is not None:
            self._piece.token_ids.append(token_id)
        return prompt.only

    def _echo(self, prompt: PromptShown) -> None:
        """Add the prompt's text, and its logprobs if requested, to the piece before any output."""
        logprobs = (None, *prompt.logprobs) if prompt.scored else ()
        for place, text in enumerate(prompt.pieces()):
            if logprobs:
                self._piece.logprobs.append(TokenLogprob(prompt.token_ids[place], logprobs[place], self._chars))
            self._add(text)
        # A schema applies to the model's output, not to the echoed prompt.
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
        """Add parts of the answer to the piece, in order. Parts after a stop string are dropped."""
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
        """Add content up to the first stop string. Return whether there was one."""
        # vLLM's detokenizer has the same rule: it searches from the text of token min_tokens + 1.
        exempt_chars = len(text) if self._read_tokens <= self._min_tokens else self._take_early(text)
        shown, self._stopped = self._stops.push(text, exempt_chars)
        self._add(shown)
        return self._stopped

    def _take_early(self, text: str) -> int:
        """Return the number of leading characters of `text` that belong to the first `min_tokens` tokens."""
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
    """True if tools, calls or results were written into the prompt as text. The answer reports this."""


def first_error(choices: Iterable[Choice]) -> FulcrumError | None:
    """Return the first error among a request's choices. After one error, the other choices are useless."""
    return next((choice.text.error for choice in choices if choice.text.error is not None), None)


class StopMatcher:
    """A search for stop strings in text that arrives in pieces.

    The result does not depend on the division into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; None so far."""

    @property
    def held_chars(self) -> int:
        """The number of characters held back because a stop string may begin with them."""
        return len(self._held)

    def push(self, text: str, exempt_chars: int = 0) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop string ended it.

        If several stop strings occur, the one that ends first is used. A stop string that ends within the first
        `exempt_chars` of `text` is ignored. One that begins there and ends later is not.
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
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
