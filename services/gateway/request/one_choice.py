"""The exchange of routes whose answers have a single choice."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from libs.contracts.errors import FulcrumError
from services.gateway.request.choice import Choice, Piece
from services.gateway.request.exchange import EVENT_STREAM, STREAM_HEADERS, OutputSignal, Wire
from services.gateway.request.unchecked import check_answers


class OneChoiceExchange(ABC):
    """An exchange that sends the answer of one choice, as one JSON object or as events in the route's own format.

    The choice's error is raised only while nothing has been sent.
    """

    def __init__(self, choice: Choice, signal: OutputSignal, headers: Mapping[str, str]) -> None:
        self._choice = choice
        self._signal = signal
        self._headers = headers

    async def whole(self, wire: Wire) -> None:
        """Send the answer as one JSON object once the choice is complete."""
        await wire.json(200, await self.reply(), self._headers)

    async def reply(self) -> object:
        """Wait until the choice is complete and return its answer. Raise its error if it failed."""
        text = self._choice.text
        while not text.done:
            await self._signal.wait()
        piece = text.take()
        if text.error is not None:
            raise text.error
        await check_answers((text.record,))
        return await self._answer(piece)

    async def stream(self, wire: Wire) -> None:
        """Send server-sent events as tokens arrive. An error after the first event is sent as the last event."""
        text, started = self._choice.text, False
        while True:
            await self._signal.wait()
            if text.error is not None and not started:
                raise text.error
            done, piece = text.done, text.take()
            if not (done or piece or text.error):
                continue
            body = b""
            if not started:
                started = True
                await wire.start(200, EVENT_STREAM, {**self._headers, **STREAM_HEADERS})
                body = self._opening()
            body += self._further(piece)
            if text.error is not None:
                await wire.part(body + self._failed(text.error), more=False)
                return
            if done:
                await check_answers((text.record,))
                await wire.part(body + await self._closing(piece), more=False)
                return
            await wire.part(body, more=True)

    @abstractmethod
    async def _answer(self, piece: Piece) -> object:
        """Return the whole answer. `piece` contains all of the choice's output."""

    @abstractmethod
    def _opening(self) -> bytes:
        """Return the events that precede the first token."""

    @abstractmethod
    def _further(self, piece: Piece) -> bytes:
        """Return the events for one more piece of the answer."""

    @abstractmethod
    def _failed(self, error: FulcrumError) -> bytes:
        """Return the events that end a stream with an error."""

    @abstractmethod
    async def _closing(self, piece: Piece) -> bytes:
        """Return the events that end a stream. `piece` is the last piece and contains the finish reason."""
