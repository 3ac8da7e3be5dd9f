"""Conversion of a response's input items into turns of a chat. Pure; raises InvalidRequest that names the item."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from libs.contracts.errors import InvalidRequest, UnsupportedField, quoted
from services.gateway.prompt.schema import MAX_CALLS, CalledFunction, Message, ToolCall
from services.gateway.responses.schema import InputCall, InputCallOutput, InputMessage, InputReasoning, InputText

Item = InputMessage | InputReasoning | InputCall | InputCallOutput
_KINDS: Final[Mapping[str, type[Item]]] = {
    "message": InputMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
}
MAX_REASON_CHARS = 200


def read_items(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert the input into turns. Consecutive reasoning, text and calls of one answer become one turn."""
    if isinstance(given, str):
        return [Message("user", given)]
    turns: list[Message] = []
    for place, plain in enumerate(given):
        item, where = _item(plain, f"input[{place}]"), f"input[{place}]"
        if isinstance(item, InputMessage) and item.role != "assistant":
            turns.append(Message(item.role, _text(item.content)))
        elif isinstance(item, InputCallOutput):
            turns.append(Message("tool", _text(item.output), tool_call_id=item.call_id))
        else:
            _answer(turns, item, where)
    return turns


def _item(plain: Mapping[str, Any], where: str) -> Item:
    kind = plain.get("type", "message")
    struct = _KINDS.get(kind) if isinstance(kind, str) else None
    if struct is None:
        text = f"{where}.type: {quoted(str(kind))} is not served; served are {', '.join(_KINDS)}"
        raise UnsupportedField(text, param=f"{where}.type")
    try:
        return msgspec.convert({key: value for key, value in plain.items() if value is not None}, struct)
    except msgspec.ValidationError as error:
        raise _explained(str(error), where) from None


def _explained(text: str, where: str) -> InvalidRequest:
    reason, _, path = text.partition(" - at `$")
    kind = UnsupportedField if "unknown field" in reason or "Invalid enum value" in reason else InvalidRequest
    field = f"{where}{path.rstrip('`')}"[:MAX_REASON_CHARS]
    return kind(f"{field}: {reason[:1].lower()}{reason[1:MAX_REASON_CHARS]}", param=field)


def _answer(turns: list[Message], item: InputMessage | InputReasoning | InputCall, where: str) -> None:
    """Add an item of an answer, merging it into the last turn if that belongs to the same answer."""
    last = turns[-1] if turns and turns[-1].role == "assistant" else None
    if last is None or (not isinstance(item, InputCall) and (last.content or last.tool_calls)):
        last = Message("assistant")
        turns.append(last)
    if isinstance(item, InputMessage):
        last.content = _text(item.content)
    elif isinstance(item, InputReasoning):
        last.reasoning_content = (last.reasoning_content or "") + _text(item.content or item.summary or [])
    else:
        calls = last.tool_calls = last.tool_calls or []
        if len(calls) >= MAX_CALLS:
            raise InvalidRequest(f"{where}: one answer has {MAX_CALLS} calls at most", param=where)
        calls.append(ToolCall(item.call_id, CalledFunction(item.name, item.arguments)))


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
