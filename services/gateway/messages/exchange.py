"""The exchange that sends one message of Anthropic's API, as a stream of events or as one JSON object."""

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
    Ping,
    StopDelta,
    StopReason,
    TextDelta,
    TextOut,
    ThinkingDelta,
    ThinkingOut,
    ToolUseOut,
)
from services.gateway.request.choice import AnswerRun, Choice, Piece
from services.gateway.request.endpoint import AnswerFactory
from services.gateway.request.exchange import OutputSignal, error_reply, sse_event
from services.gateway.request.formats import end_notes, notes, usage
from services.gateway.request.intake import Arrival
from services.gateway.request.one_choice import OneChoiceExchange
from services.gateway.request.parse import ParsedRequest
from services.gateway.request.prompt import ServedModel

_REASONS: Final[Mapping[ApiFinishReason, StopReason]] = {
    ApiFinishReason.STOP: "end_turn",
    ApiFinishReason.LENGTH: "max_tokens",
    ApiFinishReason.TOOL_CALLS: "tool_use",
}


class MessageOutput:
    """The content blocks of one message. The last block is open until another one begins."""

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._open = False
        self._texts: list[str] = []
        """The pieces of the open block's text."""

    def push(self, runs: Sequence[AnswerRun]) -> list[Event]:
        """Return the events for further parts of the answer."""
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
        """Close the open block and return its event, or nothing if no block is open."""
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
        # A copy, because the event is encoded only after the block may have been filled at its end.
        events.append(BlockStart(len(self.blocks) - 1, msgspec.structs.replace(block)))


def _delta(run: AnswerRun) -> TextDelta | ThinkingDelta | InputDelta:
    if run.kind is PartKind.ARGUMENTS:
        return InputDelta(run.text)
    return TextDelta(run.text) if run.kind is PartKind.CONTENT else ThinkingDelta(run.text)


def _input(text: str) -> Any:
    """Return a tool call's arguments as the model wrote them.

    Return an empty object if they are not a JSON object, such as those of a call that was cut off.
    """
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return msgspec.Raw(text.encode())


class MessageExchange(OneChoiceExchange):
    def __init__(
        self, choice: Choice, model: str, request_id: str, *, signal: OutputSignal, headers: Mapping[str, str]
    ) -> None:
        super().__init__(choice, signal, headers)
        self._model = model
        self._request_id = request_id
        self._output = MessageOutput()

    async def _answer(self, piece: Piece) -> MessageOut:
        self._output.push(piece.runs or ())
        self._output.end()
        message = self._message()
        message.content = self._output.blocks
        message.stop_reason, message.stop_sequence = self._stop(piece)
        return message

    def _opening(self) -> bytes:
        return _encoded([MessageStart(self._message()), Ping()])

    def _further(self, piece: Piece) -> bytes:
        return _encoded(self._output.push(piece.runs or ()))

    def _failed(self, error: FulcrumError) -> bytes:
        return _encoded([message_error(error.http_status, error_reply(error).error, self._request_id)])

    async def _closing(self, piece: Piece) -> bytes:
        stop = StopDelta(*self._stop(piece))
        return _encoded(
            [*self._output.end(), MessageDelta(stop, self._usage(), end_notes(self._choice)), MessageStop()]
        )

    def _stop(self, piece: Piece) -> tuple[StopReason | None, str | None]:
        matched, finish = self._choice.text.stop_string, piece.finish
        if finish is ApiFinishReason.STOP and matched is not None:
            return "stop_sequence", matched
        return None if finish is None else _REASONS[finish], None

    def _message(self) -> MessageOut:
        return MessageOut(
            id=f"msg_{self._request_id}", model=self._model, usage=self._usage(), x_fulcrum=notes(self._choice)
        )

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
    async def read(self, body: bytes, arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        parsed = parse_message(body)
        return parsed, partial(self._answer, parsed.model)

    def _answer(
        self,
        model_name: str,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        signal: OutputSignal,
        headers: Mapping[str, str],
    ) -> MessageExchange:
        return MessageExchange(choices[0], model_name, arrival.request_id, signal=signal, headers=headers)
