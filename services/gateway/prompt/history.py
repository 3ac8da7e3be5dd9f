"""Conversion of a chat's messages into the form that chat templates read.

Pure; raises InvalidRequest that names the field.
"""

import json
from typing import Any

from libs.contracts.errors import InvalidRequest
from libs.model.chat import Arguments, ChatMessage
from services.gateway.prompt.schema import Message, ToolCall


def chat_message(message: Message, place: int) -> ChatMessage:
    """Convert one message. `place` is its index in the chat."""
    content, role = message.content, message.role
    if content is None and role != "assistant":
        raise InvalidRequest(f"a {role} message needs content", param=f"messages[{place}].content")
    turn: dict[str, Any] = {"role": role, "content": content}
    if isinstance(content, list):
        turn["content"] = [{"type": "text", "text": part.text} for part in content]
    if message.name:
        turn["name"] = message.name
    if role == "tool":
        if not message.tool_call_id:
            raise InvalidRequest(
                "a tool message needs the id of the call that it answers", param=f"messages[{place}].tool_call_id"
            )
        turn["tool_call_id"] = message.tool_call_id
    elif role == "assistant":
        turn.update(_of_answer(message, place))
    elif message.tool_calls:
        raise InvalidRequest(f"a {role} message has no tool_calls", param=f"messages[{place}].tool_calls")
    return turn


def _of_answer(message: Message, place: int) -> dict[str, Any]:
    """Return the fields of an earlier answer other than its text."""
    names = ("reasoning_content", "reasoning")
    more: dict[str, Any] = {name: text for name in names if (text := getattr(message, name)) is not None}
    if message.tool_calls:
        where = f"messages[{place}].tool_calls"
        more["tool_calls"] = [_call(call, f"{where}[{number}]") for number, call in enumerate(message.tool_calls)]
    return more


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest("arguments must be the text of a JSON object", param=f"{where}.function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": Arguments(arguments, text)},
    }
