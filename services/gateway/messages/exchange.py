"""Sends one message as a stream of events or one JSON object, in Anthropic's order."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason
from services.gateway.answers.parts import PartKind
from services.gateway.messages.errors import message_error
from services.gateway.messages.request import parse_message
from services.gateway.messages.schema import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    MessageDelta,
    MessageOut,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    StopDelta,
    StopReason,
    TextDelta,
    TextOut,
    ThinkingDelta,
    ThinkingOut,
    ToolUseOut,
)
from services.gateway.request.choice import AnswerRun, Choice, Piece
from services.gateway.request.endpoint import Answer
from services.gateway.request.exchange import News, Wire, error_reply, sse_event
from services.gateway.request.formats import usage
from services.gateway.request.intake import Arrival
from services.gateway.request.parse import ParsedRequest
from services.gateway.request.prompt import ServedModel

_REASONS: Final[Mapping[ApiFinishReason, StopReason]] = {
    ApiFinishReason.STOP: "end_turn",
    ApiFinishReason.LENGTH: "max_tokens",
    ApiFinishReason.TOOL_CALLS: "tool_use",
}


class MessageOutput:
    """The content blocks of one message. The last is open until another begins."""

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._open = False
        self._texts: list[str] = []
        """The pieces of the open block."""

    def push(self, runs: Sequence[AnswerRun]) -> list[Event]:
        """Return the events of further parts of the answer."""
        events: list[Event] = []
        for run in runs:
            if run.kind is PartKind.CALL:
                self._begin(ToolUseOut(run.call_id, run.text), events)
                continue
            if run.kind is not PartKind.ARGUMENTS:
                kind = TextOut if run.kind is PartKind.CONTENT else ThinkingOut
                if not self._open or not isinstance(self.blocks[-1], kind):
                    self._begin(kind(), events)
            self._texts.append(run.text)
            events.append(BlockDelta(len(self.blocks) - 1, _delta(run)))
        return events

    def end(self) -> list[Event]:
        """Return the event that closes the open block, if there is one."""
        if not self._open:
            return []
        self._open = False
        block, text = self.blocks[-1], "".join(self._texts)
        if isinstance(block, ToolUseOut):
            block.input = _input(text)
        elif isinstance(block, ThinkingOut):
            block.thinking = text
        else:
            block.text = text
        return [BlockStop(len(self.blocks) - 1)]

    def _begin(self, block: OutputBlock, events: list[Event]) -> None:
        events += self.end()
        self.blocks.append(block)
        self._open, self._texts = True, []
        # A copy: the block itself is filled at its end, before events are encoded.
        events.append(BlockStart(len(self.blocks) - 1, msgspec.structs.replace(block)))


def _delta(run: AnswerRun) -> TextDelta | ThinkingDelta | InputDelta:
    if run.kind is PartKind.ARGUMENTS:
        return InputDelta(run.text)
    return TextDelta(run.text) if run.kind is PartKind.CONTENT else ThinkingDelta(run.text)


def _input(text: str) -> Any:
    """Return the object that a call's text is, as the model wrote it; an empty one if it is none or was cut off."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode())


class MessageExchange:
    """The sending of one message. The choice's error is raised only while nothing has been sent."""

    def __init__(self, choice: Choice, model: str, request_id: str, *, news: News, headers: Mapping[str, str]) -> None:
        self._choice = choice
        self._model = model
        self._request_id = request_id
        self._news = news
        self._headers = headers
        self._output = MessageOutput()

    async def whole(self, wire: Wire) -> None:
        """Send one JSON object once the choice is done."""
        text = self._choice.text
        while not text.done:
            await self._news.wait()
        piece = text.take()
        if text.error is not None:
            raise text.error
        self._output.push(piece.runs or ())
        self._output.end()
        message = self._message()
        message.content = self._output.blocks
        message.stop_reason, message.stop_sequence = self._stop(piece)
        await wire.json(200, message, self._headers)

    async def stream(self, wire: Wire) -> None:
        """Send server-sent events as tokens arrive. After an error send the error instead of the message's end."""
        text, started = self._choice.text, False
        while True:
            await self._news.wait()
            if text.error is not None and not started:
                raise text.error
            done, piece = text.done, text.take()
            if not (done or piece or text.error):
                continue
            events: list[Event] = []
            if not started:
                started = True
                headers = {**self._headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
                await wire.start(200, "text/event-stream; charset=utf-8", headers)
                events.append(MessageStart(self._message()))
            events += self._output.push(piece.runs or ())
            if text.error is not None:
                await wire.part(_encoded([*events, self._failure(text.error)]), more=False)
                return
            if done:
                await wire.part(_encoded([*events, *self._end(piece)]), more=False)
                return
            await wire.part(_encoded(events), more=True)

    def _end(self, piece: Piece) -> list[Event]:
        """Return the closing events. `piece` is the last one and holds the finish reason."""
        stop = StopDelta(*self._stop(piece))
        return [*self._output.end(), MessageDelta(stop, self._usage()), MessageStop()]

    def _failure(self, error: FulcrumError) -> Event:
        return message_error(error.http_status, error_reply(error).error, self._request_id)

    def _stop(self, piece: Piece) -> tuple[StopReason | None, str | None]:
        matched, finish = self._choice.text.stop_string, piece.finish
        if finish is ApiFinishReason.STOP and matched is not None:
            return "stop_sequence", matched
        return None if finish is None else _REASONS[finish], None

    def _message(self) -> MessageOut:
        return MessageOut(id=f"msg_{self._request_id}", model=self._model, usage=self._usage())

    def _usage(self) -> MessageUsage:
        found = usage([self._choice], 1)
        cached = found.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=found.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=found.completion_tokens,
        )


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(f"event: {event.__struct_config__.tag}\n".encode() + sse_event(event) for event in events)


class MessageReader:
    async def read(self, body: bytes, arrival: Arrival) -> tuple[ParsedRequest, Answer]:
        asked = parse_message(body)
        return asked, partial(self._answer, asked.model)

    def _answer(
        self,
        model_name: str,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        news: News,
        headers: Mapping[str, str],
    ) -> MessageExchange:
        return MessageExchange(choices[0], model_name, arrival.request_id, news=news, headers=headers)
