"""Sends one request's answer as a stream of chunks or one JSON object, and watches for the client's disconnect."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Send

from libs.contracts.errors import FulcrumError
from services.gateway.dispatch.choice import Choice, PromptShown, first_error
from services.gateway.http.formats import Format, add_prompt, details, likeliest, usage, usage_so_far
from services.gateway.http.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChoiceT,
    CompletionChoice,
    Envelope,
    ErrorBody,
    ErrorReply,
)
from services.gateway.http.stalls import ClientGone, Patience, Stalled

DONE = b"data: [DONE]\n\n"
# Time for which a client may leave its socket unread before its connection is closed.
WRITE_STALL_S = 120.0
encode = msgspec.json.Encoder().encode


def sse_event(value: object) -> bytes:
    """Encode one event. JSON has no bare line break, so an event is one line."""
    return b"data: " + encode(value) + b"\n\n"


def error_reply(error: FulcrumError) -> ErrorReply:
    return ErrorReply(ErrorBody(error.message, error.error_type, error.param, error.code))


class Wire:
    """The ASGI connection on which one answer is sent."""

    def __init__(self, send: Send, patience: Patience) -> None:
        self._send = send
        self._patience = patience

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((b"content-type", content_type.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def part(self, body: bytes, *, more: bool) -> None:
        """Send part of the body, waiting for a slow client. Raise Stalled if the client does not read at all."""
        self._patience.wait(WRITE_STALL_S, Stalled)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._patience.done()

    async def json(self, status: int, value: object, headers: Mapping[str, str]) -> None:
        body = encode(value)
        await self.start(status, "application/json", {**headers, "content-length": str(len(body))})
        await self.part(body, more=False)


# Occurs inside no JSON string, where its quotes would be escaped.
NO_CHOICES = b'"choices":[]'


@dataclass(frozen=True, slots=True)
class Frame:
    """The fields that all parts of one answer share."""

    id: str
    created: int
    model: str
    n: int
    """The number of choices generated for each prompt."""
    best: int | None
    """The number of choices shown for each prompt, likeliest first; None shows all."""
    scores: bool
    """Whether the prompt's logprobs are shown by position."""
    include_usage: bool
    continuous_usage: bool
    """Whether each chunk carries the usage so far."""
    details: bool
    headers: Mapping[str, str]


class News:
    """An event that wakes an answer when a choice has new output or the client has disconnected."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._gone = False

    def changed(self) -> None:
        """Wake the answer: a choice has new output."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait for new output; raise ClientGone if the client has disconnected."""
        await self._changed.wait()
        self._changed.clear()
        if self._gone:
            raise ClientGone

    async def watch(self, receive: Receive) -> None:
        """Wait for the client's disconnect, the only message left once the body has been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._changed.set()


class Exchange:
    """The sending of one answer. A choice's error is raised only while nothing has been sent."""

    def __init__(self, choices: list[Choice], shape: Format, frame: Frame, news: News) -> None:
        self._choices = choices
        self._format = shape
        self._frame = frame
        self._news = news

    @cached_property
    def _around(self) -> list[bytes]:
        """Return the bytes with which every chunk begins and ends."""
        none: list[ChatChunkChoice] = []
        around = self._envelope(self._format.chunk_object, none)
        if self._frame.include_usage:
            around.usage = None  # as OpenAI does on all chunks but the last
        return sse_event(around).split(NO_CHOICES)

    async def whole(self, wire: Wire) -> None:
        """Send one JSON object once every choice is done."""
        await wire.json(200, await self.reply(), self._frame.headers)

    async def reply(self) -> Envelope[ChatChoice | CompletionChoice]:
        """Return the whole answer once every choice is done."""
        while not self._done():
            await self._news.wait()
            self._raise_error()
        self._raise_error()
        shown = self._choices if self._frame.best is None else likeliest(self._choices, self._frame.n, self._frame.best)
        choices = [self._format.whole(index, choice.text.take()) for index, choice in enumerate(shown)]
        reply = self._envelope(self._format.whole_object, choices)
        for choice, answer in zip(shown, choices, strict=True):
            if choice.text.prompt is not None:
                add_prompt(choice.text.prompt, answer, reply, scores=self._frame.scores)
        reply.usage = usage(self._choices, self._frame.n)
        self._add_details(reply)
        return reply

    async def stream(self, wire: Wire) -> None:
        """Send chunks as tokens arrive, then [DONE]. After an error send the error instead of both."""
        opened: set[int] = set()
        started = False
        while True:
            await self._news.wait()
            error = first_error(self._choices)
            if error is not None and not started:
                raise error
            done = self._done()
            body = b"".join(self._chunks(opened))
            if not started and (body or done):
                started = True
                await wire.start(200, "text/event-stream; charset=utf-8", self._stream_headers())
            if error is not None:
                await wire.part(body + sse_event(error_reply(error)), more=False)
                return
            if done:
                await wire.part(body + self._closing() + DONE, more=False)
                return
            if body:
                await wire.part(body, more=True)

    def _chunks(self, opened: set[int]) -> Iterator[bytes]:
        for choice in self._choices:
            piece = choice.text.take()
            if not piece:
                continue
            prompt = None
            if choice.index not in opened:
                opened.add(choice.index)
                prompt = choice.text.prompt
                opening = self._format.opening(choice.index)
                if opening is not None:
                    yield self._chunk(opening, choice) if prompt is None else self._with(prompt, opening, choice)
                    prompt = None
            shown = self._format.chunk(choice.index, piece)
            last = piece.finish is not None and self._done() and not self._frame.include_usage
            yield self._chunk(shown, choice, last=last) if prompt is None else self._with(prompt, shown, choice)

    def _chunk(self, shown: ChatChunkChoice | CompletionChoice, choice: Choice, *, last: bool = False) -> bytes:
        if self._frame.continuous_usage:
            envelope = self._envelope(self._format.chunk_object, [shown])
            envelope.usage = usage_so_far(choice)
            return sse_event(envelope)
        if last and self._frame.details:
            envelope = self._envelope(self._format.chunk_object, [shown])
            self._add_details(envelope)
            return sse_event(envelope)
        before, after = self._around
        return b"".join((before, b'"choices":[', encode(shown), b"]", after))

    def _with(self, prompt: PromptShown, shown: ChatChunkChoice | CompletionChoice, choice: Choice) -> bytes:
        """Return the first chunk of a choice, with the parts of its prompt that the request wants shown."""
        envelope = self._envelope(self._format.chunk_object, [shown])
        if self._frame.continuous_usage:
            envelope.usage = usage_so_far(choice)
        elif self._frame.include_usage:
            envelope.usage = None
        add_prompt(prompt, shown, envelope, scores=False)
        return sse_event(envelope)

    def _closing(self) -> bytes:
        """Return the last chunk, which has no choices and carries usage."""
        if not self._frame.include_usage:
            return b""
        none: list[ChatChunkChoice] = []
        envelope = self._envelope(self._format.chunk_object, none)
        envelope.usage = usage(self._choices, self._frame.n)
        self._add_details(envelope)
        return sse_event(envelope)

    def _envelope(self, kind: str, choices: list[ChoiceT]) -> Envelope[ChoiceT]:
        frame = self._frame
        return Envelope(frame.id, kind, frame.created, frame.model, choices)

    def _add_details(self, envelope: Envelope[ChoiceT]) -> None:
        envelope.fulcrum = details(self._choices[0].generation) if self._frame.details else UNSET

    def _stream_headers(self) -> dict[str, str]:
        return {**self._frame.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}

    def _done(self) -> bool:
        return all(choice.text.done for choice in self._choices)

    def _raise_error(self) -> None:
        error = first_error(self._choices)
        if error is not None:
            raise error
