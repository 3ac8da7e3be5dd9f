"""One choice as its client sees it: tokens become text, stop strings end it, pieces wait until they can be sent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason, Generation, unmade
from libs.engine.port import Logprob
from libs.model.harmony import Channels, Verdict
from libs.model.tokenizer import Decoder
from services.gateway.prompt.stops import StopMatcher


@dataclass(slots=True)
class TokenLogprob:
    """A token that came with its logprob."""

    token_id: int
    logprob: Logprob
    text_offset: int
    """Characters of the choice's text before it."""


@dataclass(slots=True)
class Piece:
    """What has come since the last piece was taken."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: ApiFinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.finish)


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
        in_pieces: bool,
        channels: Channels | None = None,
        changed: Callable[[], None],
    ) -> None:
        """`silent_token_ids`: they end the text and are no part of it. `channels`: of what it does not show, text and
        logprobs are dropped, and stop strings are not looked for there. `changed` is called when all is there, and, for
        one who takes it `in_pieces`, when there may be a piece."""
        self.error: FulcrumError | None = None
        self.done = False
        self._request_id = request_id
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._silent = silent_token_ids
        self._in_pieces = in_pieces
        self._channels = channels
        self._held: list[tuple[int, Logprob | None]] = []
        """Tokens that `channels` cannot judge yet, a few at most."""
        self._changed = changed
        self._tokens: list[tuple[int, Logprob | None]] = []
        self._chars = 0
        self._stopped = False
        self._piece = Piece()

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """Take a token; True when a stop string ended the text."""
        self._tokens.append((token_id, logprob))
        if self._has_stops:
            self._decode()
        if self._in_pieces:
            self._changed()
        return self._stopped

    def finish(self, reason: ApiFinishReason) -> None:
        """The last token was taken."""
        self._decode()
        self._show(self._held)
        if not self._stopped:
            text, stopped = self._stops.push(self._decoder.flush())
            self._add(text if stopped else text + self._stops.flush())
            reason = ApiFinishReason.STOP if stopped else reason
        self._piece.finish = reason
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
        piece, self._piece = self._piece, Piece()
        return piece

    def _decode(self) -> None:
        self._show(self._tokens if self._channels is None else self._judged(self._channels))
        self._tokens.clear()

    def _judged(self, channels: Channels) -> Iterator[tuple[int, Logprob | None]]:
        """Tokens of the content alone."""
        for token in self._tokens:
            verdict = channels.push(token[0])
            if verdict is Verdict.HOLD:
                self._held.append(token)
                continue
            if verdict is Verdict.SHOW:
                yield from self._held
                yield token
            self._held.clear()

    def _show(self, tokens: Iterable[tuple[int, Logprob | None]]) -> None:
        for token_id, logprob in tokens:
            if logprob is not None:
                self._piece.logprobs.append(TokenLogprob(token_id, logprob, self._chars))
            if token_id not in self._silent:
                text, self._stopped = self._stops.push(self._decoder.push(token_id))
                self._add(text)

    def _add(self, text: str) -> None:
        if text:
            self._chars += len(text)
            self._piece.text.append(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt."""

    index: int
    generation: Generation
    text: ChoiceText


def first_error(choices: Iterable[Choice]) -> FulcrumError | None:
    """What one of them failed with; the others are of no use then."""
    return next((choice.text.error for choice in choices if choice.text.error is not None), None)
