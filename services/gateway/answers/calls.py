"""The tool call formats of model families, from the opening marker to the end of the calls. Pure.

The formats are those of the models' chat templates: Hermes 2 Pro and Qwen 2.5 and 3, Llama 3.1 to 3.3, Mistral from
its third tokenizer on, DeepSeek V3, R1 and V3.1.
"""

from enum import Enum, auto
from typing import Protocol

from services.gateway.answers.json_call import JsonCall, JsonText
from services.gateway.answers.marked_calls import Tools
from services.gateway.answers.parts import AnswerPart, PartKind


class CallReader(Protocol):
    """A parser of the text that follows an opening marker."""

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        """Return the parts that `text` adds, and the text after the calls or None while they go on."""
        ...

    def end(self) -> list[AnswerPart]:
        """Return the text that became no call, as content, at the end of the answer."""
        ...


class HermesCall:
    """Calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, each between tags of its own."""

    opens = ("<tool_call>",)
    specials = ("</tool_call>",)

    def __init__(self, _tools: Tools) -> None:
        self._call = JsonCall()
        self._tail = ""

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        # Anything before the closing tag is skipped.
        in_call = not self._call.ended
        parts = self._call.push(text) if in_call else []
        if not self._call.ended:
            return parts, None
        self._tail += self._call.rest if in_call else text
        at = self._tail.find(self.specials[0])
        if at < 0:
            return parts, None
        if not self._call.named:
            parts += _content(self._call.raw + self._tail[:at])
        return parts, self._tail[at + len(self.specials[0]) :]

    def end(self) -> list[AnswerPart]:
        return [] if self._call.named else _content(self._call.raw + self._tail)


class LlamaCalls:
    """Calls in the form `{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`."""

    opens = ("<|python_tag|>",)
    specials = ()

    def __init__(self, tools: Tools) -> None:
        self._is_tool = tools.__contains__
        self._call = JsonCall(self._is_tool)

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        parts: list[AnswerPart] = []
        while True:
            if not self._call.raw and not self._call.named:
                text = text.lstrip(" \t\r\n;,")
            parts += self._call.push(text)
            if not self._call.ended:
                return parts, None
            if not self._call.named:
                return parts, self._call.raw + self._call.rest
            text, self._call = self._call.rest, JsonCall(self._is_tool)

    def end(self) -> list[AnswerPart]:
        return [] if self._call.named else _content(self._call.raw)


class _Mistral(Enum):
    BEGIN = auto()
    LIST = auto()
    NAME = auto()
    ARGUMENTS = auto()


class MistralCalls:
    """Calls in the form `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for
    each.
    """

    opens = ("[TOOL_CALLS]",)
    specials = ("[ARGS]", "[CALL_ID]")

    def __init__(self, _tools: Tools) -> None:
        self._state = _Mistral.BEGIN
        self._held = ""
        self._call = JsonCall()
        self._arguments = JsonText()

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        if self._state is _Mistral.BEGIN:
            text = text.lstrip()
            if not text:
                return [], None
            self._state = _Mistral.LIST if text[0] in "[{" else _Mistral.NAME
            text = text.removeprefix("[")
        if self._state is _Mistral.LIST:
            return self._list(text)
        parts: list[AnswerPart] = []
        if self._state is _Mistral.NAME:
            self._held += text
            name, brace, text = self._held.partition("{")
            if not brace:
                return [], None
            self._held, self._state, text = "", _Mistral.ARGUMENTS, brace + text
            parts.append(AnswerPart(PartKind.CALL, _mistral_name(name)))
        size = self._arguments.push(text)
        parts += [AnswerPart(PartKind.ARGUMENTS, text[:size])] if size else []
        return parts, text[size:] if self._arguments.ended else None

    def end(self) -> list[AnswerPart]:
        if self._state is _Mistral.LIST:
            return [] if self._call.named else _content(self._call.raw)
        return _content(self._held)

    def _list(self, text: str) -> tuple[list[AnswerPart], str | None]:
        parts: list[AnswerPart] = []
        while True:
            if not self._call.raw and not self._call.named:
                text = text.lstrip(" \t\r\n,")
                if text[:1] == "]":
                    return parts, text[1:]
            parts += self._call.push(text)
            if not self._call.ended:
                return parts, None
            if not self._call.named:
                return [*parts, *_content(self._call.raw)], self._call.rest
            text, self._call = self._call.rest, JsonCall()


def _mistral_name(text: str) -> str:
    return text.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()


class _DeepSeek(Enum):
    BETWEEN = auto()
    HEAD = auto()
    NAME = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class DeepSeekCalls:
    """Calls between a begin and an end mark for all, and another pair for each call.

    V3 and R1 write `function<sep>name`, a line break and a block of JSON; V3.1 writes `name<sep>{...}`.
    """

    opens = ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)
    specials = (
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
    )

    def __init__(self, _tools: Tools) -> None:
        self._state = _DeepSeek.BETWEEN
        self._held = ""
        self._head = ""
        self._arguments = JsonText()

    def push(self, text: str) -> tuple[list[AnswerPart], str | None]:
        all_end, begin, sep, end = self.specials
        parts: list[AnswerPart] = []
        self._held += text
        while True:
            if self._state is _DeepSeek.BETWEEN:
                at = self._held.find(all_end)
                if at >= 0 and begin not in self._held[:at]:
                    return parts, self._held[at + len(all_end) :]
                found = self._pass(begin, _DeepSeek.HEAD) is not None
            elif self._state is _DeepSeek.HEAD:
                head = self._pass(sep, _DeepSeek.NAME)
                found, self._head = head is not None, head or ""
            elif self._state is _DeepSeek.NAME:
                found = self._name(parts)
            elif self._state is _DeepSeek.ARGUMENTS:
                found = self._argue(parts)
            else:
                found = self._pass(end, _DeepSeek.BETWEEN) is not None
            if not found:
                return parts, None

    def end(self) -> list[AnswerPart]:
        # An answer that breaks off between or before calls leaves nothing usable.
        return []

    def _pass(self, marker: str, state: _DeepSeek) -> str | None:
        """Consume text through the next marker and return the text before it, or None if there is no marker yet."""
        before, found, after = self._held.partition(marker)
        if not found:
            return None
        self._held, self._state = after, state
        return before

    def _name(self, parts: list[AnswerPart]) -> bool:
        before, brace, after = self._held.partition("{")
        if not brace:
            return False
        lines = before.split()
        parts.append(AnswerPart(PartKind.CALL, self._tool_name(lines[0] if lines else self._head.strip())))
        self._held, self._state, self._arguments = brace + after, _DeepSeek.ARGUMENTS, JsonText()
        return True

    @staticmethod
    def _tool_name(written: str) -> str:
        return written

    def _argue(self, parts: list[AnswerPart]) -> bool:
        size = self._arguments.push(self._held)
        if size:
            parts.append(AnswerPart(PartKind.ARGUMENTS, self._held[:size]))
        self._held = self._held[size:]
        if self._arguments.ended:
            self._state = _DeepSeek.TAIL
        return self._arguments.ended


class KimiCalls(DeepSeekCalls):
    """Kimi K2's calls, built like DeepSeek's. The name is part of the call's id, `functions.NAME:0`, before the
    arguments.
    """

    opens = ("<|tool_calls_section_begin|>",)
    specials = (
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )

    @staticmethod
    def _tool_name(written: str) -> str:
        return written.removeprefix("functions.").rpartition(":")[0] or written


def _content(text: str) -> list[AnswerPart]:
    text = text.strip()
    return [AnswerPart(PartKind.CONTENT, text)] if text else []
