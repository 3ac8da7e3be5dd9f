"""Conversion of a message request into a chat request. Pure. Errors are InvalidRequest and name the field."""

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

from libs.contracts.errors import InvalidRequest, UnsupportedField, quoted
from services.gateway.messages.schema import (
    BLOCK_TYPES,
    IMAGE_SOURCES,
    Base64Source,
    CountRequest,
    ImageBlock,
    InputBlock,
    InputMessage,
    MessageRequest,
    MessageToolChoice,
    OutputFormat,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    known_values,
)
from services.gateway.request.harmless import drop_defaults, tidy_tool
from services.gateway.request.intake import Intake
from services.gateway.request.parse import ParsedRequest, convert_chat
from services.gateway.request.prompt import Catalog
from services.gateway.request.schema import (
    MAX_CALLS,
    MAX_STOPS_CHARS,
    CalledFunction,
    ChatRequest,
    ContentPart,
    Function,
    FunctionChoice,
    ImageUrl,
    JsonSchema,
    Message,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    fit,
)

# Fields that are not served, with the values besides null that request the default behaviour.
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "service_tier": ("auto", "standard_only"),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
# The first block of Claude Code's system text, for Anthropic's accounting. It differs between requests, so prompts
# would share no prefix.
_BILLING: Final = "x-anthropic-billing-header:"
_ERROR: Final = "Error: "
# The name of an answer's schema. The chat route requires one, and no model sees it.
_SCHEMA_NAME: Final = "output"


def parse_message(body: bytes) -> ParsedRequest:
    request = fit(body, MessageRequest, _tidy, known_values)
    stops = request.stop_sequences or []
    if sum(map(len, stops)) > MAX_STOPS_CHARS:
        text = f"stop_sequences: all together are over {MAX_STOPS_CHARS} characters"
        raise InvalidRequest(text, param="stop_sequences")
    return _convert(
        request,
        ChatRequest(
            model=request.model,
            messages=[],
            stream=request.stream,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=stops or None,
        ),
    )


def parse_count(body: bytes) -> ParsedRequest:
    request = fit(body, CountRequest, _tidy, known_values)
    return _convert(request, ChatRequest(model=request.model, messages=[]))


def _tidy(body: dict[str, Any]) -> dict[str, Any]:
    """Remove fields without effect. Raise UnsupportedField for tool and block types that are not served."""
    kept = drop_defaults(body, _HARMLESS)
    for place, tool in enumerate(_dicts(kept.get("tools"))):
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "custom":
            raise _unserved(f"tools[{place}].type", kind, ("custom",))
    if isinstance(kept.get("tools"), list):
        kept["tools"] = [tidy_tool(each) for each in kept["tools"]]
    if isinstance(kept.get("system"), list):
        kept["system"] = _blocks(kept["system"], "system", ("text",))
    if isinstance(kept.get("messages"), list):
        kept["messages"] = [_message(each, f"messages[{place}]") for place, each in enumerate(kept["messages"])]
    return kept


def _message(plain: Any, where: str) -> Any:
    if not isinstance(plain, dict) or not isinstance(plain.get("content"), list):
        return plain
    return {**plain, "content": _blocks(plain["content"], f"{where}.content", BLOCK_TYPES)}


def _blocks(plain: list[Any], where: str, served: Sequence[str]) -> list[Any]:
    return [_block(each, f"{where}[{place}]", served) for place, each in enumerate(plain)]


def _block(plain: Any, where: str, served: Sequence[str]) -> Any:
    if not isinstance(plain, dict):
        return plain
    kind = plain.get("type")
    if isinstance(kind, str) and kind not in served:
        raise _unserved(f"{where}.type", kind, served)
    kept = {key: value for key, value in plain.items() if value is not None}
    if kind == "tool_result" and isinstance(kept.get("content"), list):
        kept["content"] = _blocks(kept["content"], f"{where}.content", ("text",))
    if kind == "image" and isinstance(source := kept.get("source"), dict):
        form = source.get("type")
        if isinstance(form, str) and form not in IMAGE_SOURCES:
            raise _unserved(f"{where}.source.type", form, IMAGE_SOURCES)
    return kept


def _unserved(where: str, kind: str, served: Sequence[str]) -> UnsupportedField:
    choices = f"served {'is' if len(served) == 1 else 'are'} {', '.join(served)}"
    return UnsupportedField(f"{where}: {quoted(kind)} is not served; {choices}", param=where)


def _dicts(plain: Any) -> list[dict[str, Any]]:
    return [each for each in plain if isinstance(each, dict)] if isinstance(plain, list) else []


def _convert(request: CountRequest, chat: ChatRequest) -> ParsedRequest:
    """Complete a chat request with the messages, the tools and the options of the answer."""
    output, thinking, choice = request.output_config, request.thinking, request.tool_choice
    chat.messages = read_messages(request)
    # In Anthropic's API, the answer continues a last message with the role assistant.
    chat.continue_final_message = _is_begun(chat.messages[-1]) or None
    chat.tools = [
        Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict), "function")
        for tool in request.tools or ()
    ] or None
    chat.tool_choice = _tool_choice(choice)
    chat.parallel_tool_calls = False if choice is not None and choice.disable_parallel_tool_use else None
    form, form_field = _output_format(request)
    if form is not None:
        chat.response_format = ResponseFormat("json_schema", JsonSchema(_SCHEMA_NAME, form.schema))
    parsed = replace(convert_chat(chat), ordered=True, chat_field="messages", schema_field=form_field)
    if parsed.images:
        # The positions of images in the chat differ from those in the body, so errors name `messages` only.
        parsed = replace(parsed, images=tuple(image._replace(field="messages") for image in parsed.images))
    thinks = None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled"
    if output is None or output.effort is None or thinks is False:
        return parsed if thinks is None else replace(parsed, thinking=thinks)
    # Claude Code sends an effort with every request, whatever the model.
    return replace(parsed, effort=output.effort, effort_is_hint=True, thinking=thinks)


def _output_format(request: CountRequest) -> tuple[OutputFormat | None, str]:
    """Return the answer's format and the field that contains it. Raise InvalidRequest if both fields are present."""
    form = None if request.output_config is None else request.output_config.format
    if request.output_format is None:
        return form, "output_config.format"
    if form is not None:
        text = "output_format and output_config.format name the same format: send output_config.format only"
        raise InvalidRequest(text, param="output_format")
    return request.output_format, "output_format"


def _is_begun(last: Message) -> bool:
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise InvalidRequest("tool_choice.name is missing", param="tool_choice.name")
    return NamedToolChoice(FunctionChoice(choice.name), "function")


def read_messages(request: CountRequest) -> list[Message]:
    """Convert the system text and the messages into turns of a chat.

    Each tool result becomes a turn of its own. Consecutive turns of the user are joined, as in Anthropic's API.
    """
    turns: list[Message] = []
    system = _system(request.system)
    if system:
        turns.append(Message("system", system))
    for place, message in enumerate(request.messages):
        content, where = message.content, f"messages[{place}]"
        if message.role == "assistant":
            turns.append(Message("assistant", content) if isinstance(content, str) else _answer(content, where))
            continue
        blocks = [TextBlock(content)] if isinstance(content, str) else content
        for turn in _question(message, blocks, where):
            _add_turn(turns, turn)
    return turns


def _add_turn(turns: list[Message], turn: Message) -> None:
    last = turns[-1] if turns else None
    if last is not None and last.role == turn.role == "user":
        last.content = [*_parts(last.content), *_parts(turn.content)]
    else:
        turns.append(turn)


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return [ContentPart("text", content or "")] if content is None or isinstance(content, str) else content


def _system(given: str | Sequence[TextBlock] | None) -> str | list[ContentPart] | None:
    if given is None or isinstance(given, str):
        return given
    return _content([block.text for block in given if not block.text.startswith(_BILLING)])


def _url(source: Base64Source | UrlSource) -> str:
    return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


def _content(texts: Sequence[str]) -> str | list[ContentPart]:
    return _joined([ContentPart("text", text) for text in texts])


def _question(message: InputMessage, blocks: Sequence[InputBlock], where: str) -> list[Message]:
    # Claude Code sends system text after the question. Many templates refuse the role there or omit the text, so it is
    # sent as the user's.
    turns: list[Message] = []
    parts: list[ContentPart] = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(ContentPart("text", block.text))
        elif isinstance(block, ImageBlock) and message.role == "user":
            parts.append(ContentPart("image_url", image_url=ImageUrl(_url(block.source))))
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            if parts:
                turns.append(Message("user", _joined(parts)))
                parts = []
            turns.append(Message("tool", _result(block), tool_call_id=block.tool_use_id))
        else:
            raise _misplaced(block, message.role, f"{where}.content[{place}]")
    if parts or not turns:
        turns.append(Message("user", _joined(parts)))
    return turns


def _joined(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return a message's content: a single text, or the parts, which the template joins in its own way."""
    alone = len(parts) < 2 and all(part.type == "text" for part in parts)
    return "".join(part.text or "" for part in parts) if alone else parts


def _result(block: ToolResultBlock) -> str | list[ContentPart]:
    given = block.content or ""
    texts = [given] if isinstance(given, str) else [part.text for part in given]
    if block.is_error:
        texts = [_ERROR + (texts[0] if texts else ""), *texts[1:]]  # chats have no other mark of a failed call
    return _content(texts)


def _answer(blocks: Sequence[InputBlock], where: str) -> Message:
    turn = Message("assistant")
    texts: list[str] = []
    calls: list[ToolCall] = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            turn.reasoning_content = (turn.reasoning_content or "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            calls.append(ToolCall(block.id, CalledFunction(block.name, _arguments(block, f"{where}.content[{place}]"))))
        elif not isinstance(block, RedactedThinkingBlock):
            raise _misplaced(block, "assistant", f"{where}.content[{place}]")
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{where}: one answer has {MAX_CALLS} tool_use blocks at most", param=where)
    turn.content = _content(texts) if texts or not calls else None
    turn.tool_calls = calls or None
    return turn


def _arguments(block: ToolUseBlock, where: str) -> str:
    try:
        return json.dumps(block.input, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{where}.input is nested too deeply", param=f"{where}.input") from None


def _misplaced(block: InputBlock, role: str, where: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    return InvalidRequest(f"{where}: a message of role {role} has no {kind} blocks", param=where)


class MessageCounter:
    """The handler of /v1/messages/count_tokens."""

    def __init__(self, intake: Intake, catalog: Catalog) -> None:
        self._intake = intake
        self._catalog = catalog

    async def count(self, body: bytes, allowed: AbstractSet[str], tenant: str) -> TokenCount:
        parsed = parse_count(body)
        model = self._catalog.need(parsed.model, allowed)
        (tokens,) = await self._intake.tokens(parsed, model, tenant)
        return TokenCount(len(tokens))
