"""The exchange that sends one response, as a stream of events or as one JSON object.

The pieces of the answer become items and events in OpenAI's order. A response is stored before its last event is sent.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason
from services.gateway.answers.parts import PartKind
from services.gateway.request.choice import AnswerRun, Choice, Piece, TokenLogprob
from services.gateway.request.endpoint import AnswerFactory
from services.gateway.request.exchange import OutputSignal, sse_event
from services.gateway.request.formats import ChatFormat, ChatTokenLogprob, notes, usage
from services.gateway.request.intake import Arrival
from services.gateway.request.one_choice import OneChoiceExchange
from services.gateway.request.parse import ParsedRequest
from services.gateway.request.prompt import ServedModel
from services.gateway.responses.request import Items, StoredResponses, build_response_request, parse_response
from services.gateway.responses.schema import (
    ArgumentsDelta,
    ArgumentsDone,
    CachedTokens,
    CallItem,
    Event,
    Incomplete,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ReasoningTokens,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
    TextDeltaEvent,
    TextDone,
    Whole,
)

_TEXTS: Final = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}


class ResponseOutput:
    """The items of one response. The last item is open until another one begins."""

    def __init__(self, new_id: Callable[[str], str], named: Callable[[TokenLogprob], ChatTokenLogprob] | None) -> None:
        """Create the output. `new_id` creates an item's id, given its prefix.

        `named` converts a token's logprob to its format in the answer; with None, logprobs are omitted.
        """
        self._new_id = new_id
        self._named = named
        self.items: list[Item] = []
        self._open = False
        self._texts: list[str] = []
        """The pieces of the open item's text."""
        self._logprobs: list[ChatTokenLogprob] = []
        """All logprobs of the open item's text that have been sent."""
        self._unshown: list[ChatTokenLogprob] = []
        """The logprobs whose text has not been sent yet."""

    def push(self, piece: Piece) -> list[Event]:
        """Return the events for one piece of the answer. The caller sets their sequence numbers."""
        if self._named is not None:
            self._unshown += [self._named(entry) for entry in piece.logprobs]
        events: list[Event] = []
        for run in piece.runs or ():
            self._run(run, events)
        return events

    def end(self, status: Status) -> list[Event]:
        """Return the events that close the output. The open item gets the given status."""
        events: list[Event] = []
        if not self.items:
            self._begin(MessageItem(self._new_id("msg_")), events)
        self._close(status, events)
        return events

    def _run(self, run: AnswerRun, events: list[Event]) -> None:
        if run.kind is PartKind.CALL:
            self._close("completed", events)
            self._begin(CallItem(self._new_id("fc_"), run.call_id, run.text), events)
            return
        if run.kind is PartKind.ARGUMENTS:
            self._texts.append(run.text)
            item = self.items[-1]
            events.append(ArgumentsDelta(item_id=item.id, output_index=len(self.items) - 1, delta=run.text))
            return
        kind, prefix = (MessageItem, "msg_") if run.kind is PartKind.CONTENT else (ReasoningItem, "rs_")
        if not self._open or not isinstance(self.items[-1], kind):
            self._close("completed", events)
            self._begin(kind(self._new_id(prefix)), events)
        self._texts.append(run.text)
        events.append(self._delta(run.text))

    def _delta(self, text: str) -> Event:
        item, shown = self.items[-1], None
        if isinstance(item, MessageItem):
            shown, self._unshown = self._unshown, []
            self._logprobs += shown
        return TextDeltaEvent(
            type=f"{_TEXTS[type(item)]}.delta",
            sequence_number=0,
            item_id=item.id,
            output_index=len(self.items) - 1,
            content_index=0,
            delta=text,
            logprobs=shown,
        )

    def _begin(self, item: Item, events: list[Event]) -> None:
        self.items.append(item)
        self._open, self._texts, self._logprobs = True, [], []
        place = len(self.items) - 1
        events.append(
            ItemEvent(type="response.output_item.added", output_index=place, item=msgspec.structs.replace(item))
        )
        if not isinstance(item, CallItem):
            part = OutputText() if isinstance(item, MessageItem) else ReasoningText()
            events.append(PartEvent(type="response.content_part.added", item_id=item.id, output_index=place, part=part))

    def _close(self, status: Status, events: list[Event]) -> None:
        if not self._open:
            return
        self._open = False
        item, place, text = self.items[-1], len(self.items) - 1, "".join(self._texts)
        item.status = status
        if isinstance(item, CallItem):
            item.arguments = text
            done: Event = ArgumentsDone(item_id=item.id, output_index=place, name=item.name, arguments=text)
            events.append(done)
        else:
            events += self._text_done(item, place, text)
        events.append(ItemEvent(type="response.output_item.done", output_index=place, item=item))

    def _text_done(self, item: MessageItem | ReasoningItem, place: int, text: str) -> list[Event]:
        part: OutputText | ReasoningText
        shown = None
        if isinstance(item, MessageItem):
            shown, self._unshown = [*self._logprobs, *self._unshown], []
            part = OutputText(text, logprobs=shown)
            item.content.append(part)
        else:
            part = ReasoningText(text)
            item.content.append(part)
        done = TextDone(
            type=f"{_TEXTS[type(item)]}.done",
            sequence_number=0,
            item_id=item.id,
            output_index=place,
            content_index=0,
            text=text,
            logprobs=shown,
        )
        return [done, PartEvent(type="response.content_part.done", item_id=item.id, output_index=place, part=part)]


class ResponseExchange(OneChoiceExchange):
    """The exchange that sends one response, and stores it before the last event."""

    def __init__(
        self,
        choice: Choice,
        shown: Response,
        output: ResponseOutput,
        signal: OutputSignal,
        *,
        keep: Callable[[Response], Awaitable[bool]] | None,
        headers: Mapping[str, str],
    ) -> None:
        """Create the exchange.

        `keep` stores the response and returns whether it succeeded. With None, nothing is stored.
        """
        super().__init__(choice, signal, headers)
        self._shown = shown
        shown.x_fulcrum = notes(choice)
        # Whether storing succeeds is known only at the end, so earlier events say that the response is not stored.
        shown.store = False
        self._output = output
        self._keep = keep
        self._sent = 0

    async def _answer(self, piece: Piece) -> Response:
        self._output.push(piece)
        await self._end(piece)
        return self._shown

    def _opening(self) -> bytes:
        first = ("response.created", "response.in_progress")
        return self._events([Whole(type=name, response=self._shown) for name in first])

    def _further(self, piece: Piece) -> bytes:
        return self._events(self._output.push(piece))

    async def _closing(self, piece: Piece) -> bytes:
        return self._events(await self._end(piece))

    async def _end(self, piece: Piece) -> list[Event]:
        """Complete the response and return its closing events.

        `piece` is the last one and contains the finish reason.
        """
        cut = piece.finish is ApiFinishReason.LENGTH
        shown = self._shown
        events = self._output.end("incomplete" if cut else "completed")
        shown.status = "incomplete" if cut else "completed"
        shown.incomplete_details = Incomplete("max_output_tokens") if cut else None
        shown.x_fulcrum = notes(self._choice)
        self._fill()
        if self._keep is not None:
            shown.store = True  # so that the stored copy is complete
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
    def __init__(self, kept: StoredResponses) -> None:
        self._kept = kept

    async def read(self, body: bytes, arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        # The request may continue an earlier response, which is read first.
        request = parse_response(body)
        previous = request.previous_response_id
        earlier = await self._kept.items(arrival.headers.tenant, previous) if previous else []
        # Clients retrieve the response by its id, so it is generated here and never taken from a header.
        found = build_response_request(request, earlier, _new_id("resp_"), arrival.arrival_ns // 1_000_000_000)
        return found.parsed, partial(
            self._answer,
            found.shown,
            items=found.items if found.store else None,
            logprobs=found.parsed.sampling.logprobs,
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
        signal: OutputSignal,
        headers: Mapping[str, str],
    ) -> ResponseExchange:
        named = ChatFormat(model.tokenizer, logprobs=True).token if logprobs else None
        keep = None if items is None else partial(self._kept.keep, arrival.headers.tenant, items)
        output = ResponseOutput(_new_id, named)
        return ResponseExchange(choices[0], shown, output, signal, keep=keep, headers=headers)


def _new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(ID_BYTES)
