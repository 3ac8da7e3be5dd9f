"""Conversion of an answer's pieces into items of a response and their events, in OpenAI's order. Pure."""

from collections.abc import Callable
from typing import Final

import msgspec

from services.gateway.answers.parts import PartKind
from services.gateway.request.choice import AnswerRun, Piece, TokenLogprob
from services.gateway.request.formats import ChatTokenLogprob
from services.gateway.responses.replies import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Event,
    Item,
    ItemEvent,
    MessageItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Status,
    TextDelta,
    TextDone,
)

_TEXTS: Final = {MessageItem: "response.output_text", ReasoningItem: "response.reasoning_text"}


class ResponseOutput:
    """The items of one response. The last is open until another begins."""

    def __init__(self, new_id: Callable[[str], str], named: Callable[[TokenLogprob], ChatTokenLogprob] | None) -> None:
        """`new_id` makes an item's id from a prefix. `named` renders a token's logprob; None shows no logprobs."""
        self._new_id = new_id
        self._named = named
        self.items: list[Item] = []
        self._open = False
        self._texts: list[str] = []
        """The pieces of the open item's text."""
        self._logprobs: list[ChatTokenLogprob] = []
        """All logprobs of the open item's text that have been sent."""
        self._unshown: list[ChatTokenLogprob] = []
        """The logprobs that wait for their text."""

    def push(self, piece: Piece) -> list[Event]:
        """Return the events of a piece. The sender sets their sequence numbers."""
        if self._named is not None:
            self._unshown += [self._named(entry) for entry in piece.logprobs]
        events: list[Event] = []
        for run in piece.runs or ():
            self._run(run, events)
        return events

    def end(self, status: Status) -> list[Event]:
        """Return the closing events. `status` applies to the open item."""
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
        return TextDelta(
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
