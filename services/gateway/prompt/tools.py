"""Which tools a chat may call, and whether it has to. Pure; raises InvalidRequest that names the field."""

from dataclasses import dataclass
from typing import Any

import msgspec

from libs.contracts.errors import InvalidRequest, quoted
from services.gateway.prompt.schema import ChatRequest, NamedToolChoice, Tool

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call."""

    tools: tuple[dict[str, Any], ...]
    """As chat templates take them, in OpenAI's shape."""
    parallel: bool
    """Whether one answer may have several calls."""
    chars: int
    """About how much text they are."""
    required: bool = False
    """Whether at least one has to be called."""
    named: str | None = None
    """The one that has to be called, and no other."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the arguments of all that may be called, by name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def callable(self) -> list[tuple[str, dict[str, Any], str]]:
        """(name, schema of the arguments, the field that it stands in) of each that a guide may let be called."""
        return [
            (tool["function"]["name"], {"type": "object", **tool["function"]["parameters"]}, f"tools[{place}].function")
            for place, tool in enumerate(self.tools)
            if self.named in (None, tool["function"]["name"])
        ]


def tool_use(request: ChatRequest) -> ToolUse | None:
    """None where no tool may be called."""
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
        # A named one is called once, as OpenAI and vLLM have it.
        parallel=named is None and request.parallel_tool_calls is not False,
        chars=len(msgspec.json.encode(tools)),
        required=named is not None or choice == "required",
        named=named,
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    shown["parameters"] = function.parameters or _NO_PARAMETERS
    return {"type": "function", "function": shown}
