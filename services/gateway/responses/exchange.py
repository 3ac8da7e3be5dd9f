"""Sends one response as a stream of events or one JSON object, and stores it before its end is announced."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason
from services.gateway.request.choice import Choice, Piece
from services.gateway.request.endpoint import Answer
from services.gateway.request.exchange import News, Wire, sse_event
from services.gateway.request.formats import ChatFormat, usage
from services.gateway.request.intake import Arrival
from services.gateway.request.parse import Asked
from services.gateway.request.prompt import ServedModel
from services.gateway.responses.keeping import KeptResponses
from services.gateway.responses.output import ResponseOutput
from services.gateway.responses.replies import (
    CachedTokens,
    Event,
    Incomplete,
    ReasoningTokens,
    Response,
    ResponseError,
    ResponseUsage,
    Whole,
)
from services.gateway.responses.request import Items, parse_response, response_asked


class ResponseExchange:
    """The sending of one response. The choice's error is raised only while nothing has been sent."""

    def __init__(
        self,
        choice: Choice,
        shown: Response,
        output: ResponseOutput,
        news: News,
        *,
        keep: Callable[[Response], Awaitable[bool]] | None,
        headers: Mapping[str, str],
    ) -> None:
        """`keep` stores the response and returns whether it could; None does not store it."""
        self._choice = choice
        self._shown = shown
        shown.store = False  # until it is kept: a stream's first events must not promise what its last takes back
        self._output = output
        self._news = news
        self._keep = keep
        self._headers = headers
        self._sent = 0

    async def whole(self, wire: Wire) -> None:
        """Send one JSON object once the choice is done."""
        text = self._choice.text
        while not text.done:
            await self._news.wait()
        piece = text.take()
        if text.error is not None:
            raise text.error
        self._output.push(piece)
        await self._end(piece)
        await wire.json(200, self._shown, self._headers)

    async def stream(self, wire: Wire) -> None:
        """Send server-sent events, numbered from 0."""
        text, started = self._choice.text, False
        while True:
            await self._news.wait()
            if text.error is not None and not started:
                raise text.error
            done, piece = text.done, text.take()
            if not (done or piece or text.error):
                continue
            body = b""
            if not started:
                started = True
                headers = {**self._headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
                await wire.start(200, "text/event-stream; charset=utf-8", headers)
                first = ("response.created", "response.in_progress")
                body = self._events([Whole(type=name, response=self._shown) for name in first])
            body += self._events(self._output.push(piece))
            if text.error is not None:
                await wire.part(body + self._failed(text.error), more=False)
                return
            if done:
                await wire.part(body + self._events(await self._end(piece)), more=False)
                return
            await wire.part(body, more=True)

    async def _end(self, piece: Piece) -> list[Event]:
        """Return the closing events. `piece` is the last one and holds the finish reason."""
        cut = piece.finish is ApiFinishReason.LENGTH
        shown = self._shown
        events = self._output.end("incomplete" if cut else "completed")
        shown.status = "incomplete" if cut else "completed"
        shown.incomplete_details = Incomplete("max_output_tokens") if cut else None
        self._fill()
        if self._keep is not None:
            shown.store = True  # in what is kept
            shown.store = await self._keep(shown)
        return [*events, Whole(type=f"response.{shown.status}", response=shown)]

    def _failed(self, error: FulcrumError) -> bytes:
        events = self._output.end("incomplete")
        self._shown.status = "failed"
        self._shown.error = ResponseError(error.code, error.message)
        self._fill()
        return self._events([*events, Whole(type="response.failed", response=self._shown)])

    def _fill(self) -> None:
        found = usage([self._choice], 1)
        self._shown.output = self._output.items
        self._shown.usage = ResponseUsage(
            found.prompt_tokens,
            CachedTokens(found.prompt_tokens_details.cached_tokens),
            found.completion_tokens,
            ReasoningTokens(self._choice.text.reasoning_tokens or 0),
            found.total_tokens,
        )

    def _events(self, events: Sequence[Event]) -> bytes:
        parts = []
        for event in events:
            event.sequence_number = self._sent
            self._sent += 1
            parts.append(f"event: {event.type}\n".encode() + sse_event(event))
        return b"".join(parts)


ID_BYTES = 24


class ResponseReader:
    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    async def read(self, body: bytes, arrival: Arrival) -> tuple[Asked, Answer]:
        # Waits for the earlier response that this one continues.
        request = parse_response(body)
        previous = request.previous_response_id
        earlier = await self._kept.items(arrival.headers.tenant, previous) if previous else []
        # An id of ours, whatever the client's request is called: by its id a response is got again.
        found = response_asked(request, earlier, _new_id("resp_"), arrival.arrival_ns // 1_000_000_000)
        return found.asked, partial(
            self._answer,
            found.shown,
            items=found.items if found.store else None,
            logprobs=found.asked.sampling.logprobs,
        )

    def _answer(
        self,
        shown: Response,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        items: Items | None,
        logprobs: bool,
        news: News,
        headers: Mapping[str, str],
    ) -> ResponseExchange:
        named = ChatFormat(model.tokenizer, logprobs=True).token if logprobs else None
        keep = None if items is None else partial(self._kept.keep, arrival.headers.tenant, items)
        output = ResponseOutput(_new_id, named)
        return ResponseExchange(choices[0], shown, output, news, keep=keep, headers=headers)


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(ID_BYTES)
