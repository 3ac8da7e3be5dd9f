"""Tools, tool calls and results as text in Hermes's format, for chat templates without tool support. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from libs.model.chat import PART_JOINER, ChatMessage

FORMAT: Final = "hermes"
"""The call format that the prompt describes to a model whose tools are given as text."""
_SYSTEM_ROLES: Final = ("system", "developer")


def as_text(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], *, shows_system: bool
) -> list[ChatMessage]:
    """Return the messages with tools, calls and results written into their text.

    The roles in the result are those that every chat template supports, and tool results become messages of the user.
    Without `shows_system`, tools are written into the user's first message.
    """
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    turns: list[ChatMessage] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        turn = _result(message, names) if is_result else _answer(message)
        if after_result and turn["role"] == "user":
            # Many templates raise an error for two consecutive messages of the user.
            turns[-1] = {**turns[-1], "content": _joined(turns[-1]["content"], turn["content"], "\n")}
        else:
            turns.append(turn)
        after_result = is_result
    return _with_tools(turns, tools, shows_system=shows_system) if tools else turns


def _with_tools(
    turns: list[ChatMessage], tools: Sequence[Mapping[str, Any]], *, shows_system: bool
) -> list[ChatMessage]:
    listed = _listed(tools)
    first = turns[0] if turns else None
    if shows_system:
        if first is not None and first["role"] in _SYSTEM_ROLES:
            return [{**first, "content": _joined(first["content"], listed, "\n\n")}, *turns[1:]]
        return [{"role": "system", "content": listed}, *turns]
    place = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": listed}, *turns]
    turn = turns[place]
    return [*turns[:place], {**turn, "content": _joined(listed, turn["content"], "\n\n")}, *turns[place + 1 :]]


def _listed(tools: Sequence[Mapping[str, Any]]) -> str:
    return (
        "You may call functions to help with the request. These are described by JSON:\n"
        f"<tools>\n{json.dumps(list(tools), ensure_ascii=False)}\n</tools>\n\n"
        "To call one, write its name and its arguments as JSON between these tags:\n"
        '<tool_call>\n{"name": <function\'s name>, "arguments": <object of arguments>}\n</tool_call>\n'
        "Its result follows between <tool_response> and </tool_response>."
    )


def _answer(message: ChatMessage) -> ChatMessage:
    """Return an earlier answer with its calls written into its text, in the same format that the grammar enforces."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"], ensure_ascii=False)},'
        f' "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in calls
    )
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**turn, "content": _joined(turn["content"], written, "\n") if turn["content"] else written}


def _result(message: ChatMessage, names: Mapping[str, str]) -> ChatMessage:
    content = message["content"]
    if isinstance(content, list):
        content = PART_JOINER.join(part["text"] for part in content)
    name = names.get(message["tool_call_id"])
    shown = {"content": content} if name is None else {"name": name, "content": content}
    return {
        "role": "user",
        "content": f"<tool_response>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_response>",
    }


def _joined(before: Any, after: Any, by: str) -> Any:
    """Join two contents. The result is a text, or a list of parts if either is a list."""
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}{by}{after}" if before else after
    return [*_parts(before), *_parts(after)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
