"""The messages and tools of a chat, converted for chat templates.

Pure. Errors are InvalidRequest and name the field.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from libs.contracts.errors import InvalidRequest, quoted
from libs.model.chat import Arguments, ChatMessage
from services.gateway.images.files import SentImage
from services.gateway.request.schema import ChatRequest, ContentPart, Message, NamedToolChoice, Tool, ToolCall

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: tuple[dict[str, Any], ...]
    """The tools in OpenAI's format, which chat templates expect."""
    parallel: bool
    """True if one answer may contain several calls."""
    chars: int
    """The approximate number of characters of the tools in the prompt."""
    required: bool = False
    """True if the model must call at least one tool."""
    named: str | None = None
    """The only tool that the model may call, and must call; None if the request names none."""
    strict: frozenset[str] = frozenset()
    """The names of tools whose schema must be enforced as a whole."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schemas of the tools' arguments, by tool name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def callable(self) -> list[tuple[str, dict[str, Any], str]]:
        """Return the name, the schema of the arguments, and the field that contains it for each tool that may be
        called.
        """
        return [
            (tool["function"]["name"], {"type": "object", **tool["function"]["parameters"]}, f"tools[{place}].function")
            for place, tool in enumerate(self.tools)
            if self.named in (None, tool["function"]["name"])
        ]


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Return the tools that the model may call, or None if there are none."""
    choice, tools = request.tool_choice, request.tools or []
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if not tools and (named or choice == "required"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InvalidRequest(f"tools: two are named {quoted(twice)}", param="tools")
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice: {quoted(named)} is not among the tools", param="tool_choice")
    return ToolUse(
        tools=tuple(_tool(tool) for tool in tools),
        # A named tool is called exactly once, as in OpenAI's API and vLLM.
        parallel=named is None and request.parallel_tool_calls is not False,
        chars=len(msgspec.json.encode(tools)),
        required=named is not None or choice == "required",
        named=named,
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    shown["parameters"] = function.parameters or _NO_PARAMETERS
    return {"type": "function", "function": shown}


def chat_message(message: Message, place: int) -> ChatMessage:
    """Convert one message for the chat template. `place` is its index in the chat."""
    content, role = message.content, message.role
    if content is None and role != "assistant":
        raise InvalidRequest(f"a {role} message needs content", param=f"messages[{place}].content")
    turn: dict[str, Any] = {"role": role, "content": content}
    if isinstance(content, list):
        turn["content"] = [_part(part, role, f"messages[{place}].content[{at}]") for at, part in enumerate(content)]
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


def _part(part: ContentPart, role: str, where: str) -> dict[str, Any]:
    if part.type == "text":
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
        if part.image_url is not None:
            raise InvalidRequest(f"{where}: a part of type text has no image_url", param=f"{where}.image_url")
        return {"type": "text", "text": part.text}
    if part.image_url is None:
        raise InvalidRequest(f"{where}.image_url is missing", param=f"{where}.image_url")
    if part.text is not None:
        raise InvalidRequest(f"{where}: a part of type image_url has no text", param=f"{where}.text")
    if role != "user":
        raise InvalidRequest(f"{where}: only a user's messages may contain images", param=f"{where}.type")
    return {"type": "image"}


def sent_images(messages: Sequence[Message]) -> tuple[SentImage, ...]:
    """Return the images of a chat in order. The parts of its messages must have been checked."""
    return tuple(
        SentImage(part.image_url.url, f"messages[{place}].content[{at}].image_url.url")
        for place, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if part.image_url is not None
    )


def _of_answer(message: Message, place: int) -> dict[str, Any]:
    """Return the reasoning and calls of an earlier answer."""
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
