"""One request's HTTP exchange: its body, read within limits, and its answer, sent as a stream of chunks or one JSON
object.

A single task checks the time limits of all requests once a second. A timer per wait would cost more, because an answer
waits for its client once per token.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Send

from libs.contracts.errors import BodyTooLarge, FulcrumError, InvalidRequest, QueueFull
from libs.dispatch.generation import RETRY_AFTER_S
from libs.dispatch.ports import OneForAll, Tenancy
from libs.policy.gateway.places import queue_room
from services.gateway.request.choice import Choice, PromptShown, first_error
from services.gateway.request.formats import (
    ChatChoice,
    ChatChunkChoice,
    ChoiceT,
    CompletionChoice,
    Envelope,
    ErrorBody,
    ErrorReply,
    Format,
    Notes,
    add_prompt,
    details,
    end_notes,
    likeliest,
    notes,
    usage,
    usage_so_far,
)
from services.gateway.request.tool_text import FORMAT
from services.gateway.request.unchecked import check_answers

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
STREAM_HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# The interval between checks of all waits, and thus the longest time by which a wait exceeds its limit.
SWEEP_S = 1.0


class Stalled(Exception):
    """An error for a client that has not read its answer for too long."""


class ReadDeadline:
    """The time limit of one request's current wait for its client."""

    def __init__(self, task: "asyncio.Task[object]", tenant: str = "") -> None:
        self.tenant = tenant
        self._task = task
        self._loop = task.get_loop()
        self._until_s = 0.0
        self._late: Callable[[], Exception] = Stalled
        self.error: Exception | None = None
        self.body_bytes = 0
        """The number of body bytes that have arrived."""

    def wait(self, limit_s: float, late: Callable[[], Exception]) -> None:
        """Start a wait for the client.

        If `done` is not called within the limit, the request's task is cancelled and `late()` raised.
        """
        self._until_s = self._loop.time() + limit_s
        self._late = late

    def done(self) -> None:
        self._until_s = 0.0

    def check(self, now_s: float) -> None:
        if self.error is None and 0 < self._until_s < now_s:
            self.error = self._late()
            self._task.cancel()


class Stalls:
    """All requests that are being read or answered.

    Their number is bounded, because each may have an answer in memory that its client has not read. The size of their
    bodies is bounded too. A body counts until its answer has ended, because the prompt's tokens occupy about as much
    memory as the body.
    """

    def __init__(self, most: int, most_body_bytes: int, tenants: Tenancy | None = None) -> None:
        """Create the record of open requests.

        Each of `tenants` may use a part of both bounds that leaves room for the others; with None, all requests are
        treated alike.
        """
        self._most = most
        self._most_body_bytes = most_body_bytes
        self._tenants = tenants or OneForAll()
        self._watched: set[ReadDeadline] = set()
        self._open: Counter[str] = Counter()
        # By tenant, like `_open`.
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def body_bytes(self) -> int:
        return self._bytes.total()

    def check_room(self, tenant: str = "") -> None:
        """Raise QueueFull if the number of open requests has reached its bound or the tenant's part of it."""
        if len(self._watched) >= self._most:
            raise QueueFull(f"{self._most} requests are open already", retry_after_s=RETRY_AFTER_S)
        if not self._has_room(self._most, self._open, tenant, 1):
            message = f"{self._open[tenant]} requests of tenant {tenant} are open already: others need room too"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)

    def hold(self, read_deadline: ReadDeadline, size_bytes: int) -> None:
        """Count `size_bytes` more for a request.

        Raise QueueFull if the size of all bodies would exceed its bound or the tenant's part of it.
        """
        if self.body_bytes + size_bytes > self._most_body_bytes:
            message = f"the bodies of open requests take {self._most_body_bytes} bytes already"
            raise QueueFull(message, retry_after_s=RETRY_AFTER_S)
        others_bytes = self._bytes[read_deadline.tenant] - read_deadline.body_bytes  # a single body may have any size
        if others_bytes and not self._has_room(self._most_body_bytes, self._bytes, read_deadline.tenant, size_bytes):
            held = self._bytes[read_deadline.tenant]
            message = f"the bodies of open requests of tenant {read_deadline.tenant} take {held} bytes already"
            raise QueueFull(f"{message}: others need room too", retry_after_s=RETRY_AFTER_S)
        read_deadline.body_bytes += size_bytes
        self._bytes[read_deadline.tenant] += size_bytes

    def _has_room(self, most: int, taken: Counter[str], tenant: str, more: int) -> bool:
        if not self._tenants.are_distinct:
            return True
        return queue_room(most, taken.total(), taken[tenant], self._tenants.weight(tenant)) >= more

    @contextmanager
    def watched(self, tenant: str = "") -> Iterator[ReadDeadline]:
        """Watch the waits of the current task. If a wait exceeds its limit, raise its error from this context."""
        task = asyncio.current_task()
        assert task is not None
        read_deadline = ReadDeadline(task, tenant)
        self._watched.add(read_deadline)
        self._open[tenant] += 1
        try:
            yield read_deadline
        except asyncio.CancelledError:
            if read_deadline.error is None or task.uncancel():
                raise
            raise read_deadline.error from None
        finally:
            self._watched.discard(read_deadline)
            for counts, less in ((self._open, 1), (self._bytes, read_deadline.body_bytes)):
                counts[tenant] -= less
                if not counts[tenant]:
                    del counts[tenant]

    async def sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.look(loop.time())

    def look(self, now_s: float) -> None:
        """Cancel the requests whose current wait has exceeded its limit at `now_s`, a time of the event loop."""
        for read_deadline in list(self._watched):
            read_deadline.check(now_s)


# The time in which a client must send its whole body.
BODY_TIMEOUT_S = 30.0


class ClientGone(Exception):
    pass


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], max_bytes: int, read_deadline: ReadDeadline, stalls: Stalls
) -> bytes:
    """Return the whole body.

    Raise BodyTooLarge or QueueFull as soon as a limit is exceeded, and ClientGone if the client disconnects.
    `read_deadline` limits the time, and `stalls` the size of all open bodies.
    """
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
    read_deadline.wait(BODY_TIMEOUT_S, _too_slow)
    parts: list[bytes] = []
    room_bytes = max_bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        room_bytes -= len(part)
        if room_bytes < 0:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes", param="body")
        stalls.hold(read_deadline, len(part))
        parts.append(part)
        if not message.get("more_body", False):
            read_deadline.done()
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_slow() -> InvalidRequest:
    return InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", param="body")


DONE = b"data: [DONE]\n\n"
# The time after which a connection is closed if the client has read nothing.
WRITE_STALL_S = 120.0
encode = msgspec.json.Encoder().encode


def sse_event(value: object) -> bytes:
    """Encode one server-sent event. It is a single line, because encoded JSON contains no line breaks."""
    return b"data: " + encode(value) + b"\n\n"


def error_reply(error: FulcrumError) -> ErrorReply:
    return ErrorReply(ErrorBody(error.message, error.error_type, error.param, error.code))


class Wire:
    def __init__(self, send: Send, read_deadline: ReadDeadline) -> None:
        self._send = send
        self._read_deadline = read_deadline

    async def start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((b"content-type", content_type.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def part(self, body: bytes, *, more: bool) -> None:
        """Send a part of the body. Raise Stalled if the client does not read it in time."""
        self._read_deadline.wait(WRITE_STALL_S, Stalled)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._read_deadline.done()

    async def json(self, status: int, value: object, headers: Mapping[str, str]) -> None:
        body = encode(value)
        await self.start(status, "application/json", {**headers, "content-length": str(len(body))})
        await self.part(body, more=False)


# This text cannot occur inside a JSON string, where its quotes would be escaped.
NO_CHOICES = b'"choices":[]'


@dataclass(frozen=True, slots=True)
class Frame:
    id: str
    created: int
    model: str
    n: int
    """The number of choices generated for each prompt."""
    best: int | None
    """The number of choices to return for each prompt, most likely first; None returns all."""
    scores: bool
    """True if the answer lists the prompt's logprobs by position."""
    include_usage: bool
    continuous_usage: bool
    """True if each chunk includes the usage so far."""
    details: bool
    headers: Mapping[str, str]


class OutputSignal:
    """An event that wakes the task that sends an answer, on new output or when the client disconnects."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._gone = False

    def changed(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        """Wait for new output. Raise ClientGone if the client has disconnected."""
        await self._changed.wait()
        self._changed.clear()
        if self._gone:
            raise ClientGone

    async def watch(self, receive: Receive) -> None:
        """Wait until the client disconnects. No other message can arrive once the body has been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._changed.set()


class Exchange:
    """The exchange that sends the choices of one completion or chat.

    A choice's error is raised only while nothing has been sent.
    """

    def __init__(self, choices: list[Choice], shape: Format, frame: Frame, signal: OutputSignal) -> None:
        self._choices = choices
        self._format = shape
        self._frame = frame
        self._signal = signal

    @cached_property
    def _around(self) -> list[bytes]:
        """The bytes before and after the choices in a plain chunk, encoded once, because a stream has a chunk for each
        token.
        """
        none: list[ChatChunkChoice] = []
        around = self._envelope(self._format.chunk_object, none)
        if self._frame.include_usage:
            around.usage = None  # as OpenAI does on all chunks but the last
        return sse_event(around).split(NO_CHOICES)

    async def whole(self, wire: Wire) -> None:
        """Send the answer as one JSON object once every choice is complete."""
        await wire.json(200, await self.reply(), self._frame.headers)

    async def reply(self) -> Envelope[ChatChoice | CompletionChoice]:
        """Wait until every choice is complete and return the answer. Raise the first error of a choice."""
        while not self._done():
            await self._signal.wait()
            self._raise_error()
        self._raise_error()
        shown = self._choices if self._frame.best is None else likeliest(self._choices, self._frame.n, self._frame.best)
        choices = [self._format.whole(index, choice.text.take()) for index, choice in enumerate(shown)]
        await check_answers(choice.text.record for choice in shown)
        reply = self._envelope(self._format.whole_object, choices)
        for choice, answer in zip(shown, choices, strict=True):
            if choice.text.prompt is not None:
                add_prompt(choice.text.prompt, answer, reply, scores=self._frame.scores)
        reply.usage = usage(self._choices, self._frame.n)
        reply.x_fulcrum = notes(*shown)
        self._add_details(reply)
        return reply

    async def stream(self, wire: Wire) -> None:
        """Send chunks as tokens arrive, and finally [DONE].

        An error after the first chunk is sent as the last event.
        """
        opened: set[int] = set()
        started = False
        while True:
            await self._signal.wait()
            error = first_error(self._choices)
            if error is not None and not started:
                raise error
            done = self._done()
            if done and error is None:
                await check_answers(choice.text.record for choice in self._choices)
            body = b"".join(self._chunks(opened))
            if not started and (body or done):
                started = True
                await wire.start(200, EVENT_STREAM, self._stream_headers())
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
                    # Chunks that differ from others in more than the choice are encoded separately.
                    plain = prompt is None and (len(opened) > 1 or not choice.tools_as_text)
                    yield self._chunk(opening, choice) if plain else self._first(prompt, opening, choice, len(opened))
                    prompt = None
            shown = self._format.chunk(choice.index, piece)
            last = piece.finish is not None and self._done() and not self._frame.include_usage
            if prompt is None:
                yield self._chunk(shown, choice, last=last)
            else:
                yield self._first(prompt, shown, choice, last=last)

    def _chunk(self, shown: ChatChunkChoice | CompletionChoice, choice: Choice, *, last: bool = False) -> bytes:
        if self._frame.continuous_usage:
            envelope = self._envelope(self._format.chunk_object, [shown])
            envelope.usage = usage_so_far(choice)
            envelope.x_fulcrum = end_notes(*self._choices) if last else UNSET
            return sse_event(envelope)
        found = end_notes(*self._choices) if last else UNSET
        if last and (self._frame.details or found):
            envelope = self._envelope(self._format.chunk_object, [shown])
            envelope.x_fulcrum = found
            self._add_details(envelope)
            return sse_event(envelope)
        before, after = self._around
        return b"".join((before, b'"choices":[', encode(shown), b"]", after))

    def _first(
        self,
        prompt: PromptShown | None,
        shown: ChatChunkChoice | CompletionChoice,
        choice: Choice,
        opened: int = 0,
        *,
        last: bool = False,
    ) -> bytes:
        """Return the first chunk of a choice, with the requested parts of its prompt.

        `opened` is the number of choices that have been opened. The first of them includes the notes on the request.
        """
        envelope = self._envelope(self._format.chunk_object, [shown])
        if self._frame.continuous_usage:
            envelope.usage = usage_so_far(choice)
        elif self._frame.include_usage:
            envelope.usage = None
        if opened == 1 and choice.tools_as_text:
            envelope.x_fulcrum = Notes(FORMAT)
        elif last:
            envelope.x_fulcrum = end_notes(*self._choices)
        if prompt is not None:
            add_prompt(prompt, shown, envelope, scores=False)
        return sse_event(envelope)

    def _closing(self) -> bytes:
        """Return the chunk after all choices, which contains the usage, or nothing if usage was not requested."""
        if not self._frame.include_usage:
            return b""
        none: list[ChatChunkChoice] = []
        envelope = self._envelope(self._format.chunk_object, none)
        envelope.usage = usage(self._choices, self._frame.n)
        envelope.x_fulcrum = end_notes(*self._choices)
        self._add_details(envelope)
        return sse_event(envelope)

    def _envelope(self, kind: str, choices: list[ChoiceT]) -> Envelope[ChoiceT]:
        frame = self._frame
        return Envelope(frame.id, kind, frame.created, frame.model, choices)

    def _add_details(self, envelope: Envelope[ChoiceT]) -> None:
        envelope.fulcrum = details(self._choices[0].generation) if self._frame.details else UNSET

    def _stream_headers(self) -> dict[str, str]:
        return {**self._frame.headers, **STREAM_HEADERS}

    def _done(self) -> bool:
        return all(choice.text.done for choice in self._choices)

    def _raise_error(self) -> None:
        error = first_error(self._choices)
        if error is not None:
            raise error
