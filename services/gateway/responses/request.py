"""Conversion of a response's body into a chat request. Pure; raises InvalidRequest that names the field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from libs.contracts.errors import InvalidRequest, UnsupportedField, quoted
from services.gateway.request.parse import Asked, chat_asked
from services.gateway.request.schema import (
    MAX_CALLS,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionChoice,
    JsonSchema,
    Message,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    fit,
)
from services.gateway.responses.replies import ReasoningShown, Response, TextShown
from services.gateway.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    InputText,
    ResponseRequest,
    ResponseToolChoice,
    TextFormat,
)

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


# Fields that are not served, with the values, besides null, that request the default behaviour.
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
}
_INCLUDED: Final = (LOGPROBS, ENCRYPTED)
Items = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ResponseAsked:
    """A parsed response request with its chat."""

    asked: Asked
    items: Items
    """The whole input, including that of earlier responses."""
    shown: Response
    """The response before any output has arrived."""
    store: bool


def parse_response(body: bytes) -> ResponseRequest:
    request = fit(body, ResponseRequest, _tidy)
    for name in request.include or ():
        if name not in _INCLUDED:
            text = f"include: {quoted(name)} is not served; served are {', '.join(_INCLUDED)}"
            raise UnsupportedField(text, param="include")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return request


def response_asked(request: ResponseRequest, earlier: Items, response_id: str, created_s: int) -> ResponseAsked:
    """Convert a request into a chat. `earlier` holds the items of the conversation before it."""
    own = request.input
    items = [*earlier, *([{"role": "user", "content": own}] if isinstance(own, str) else own)]
    turns = read_items(items)
    if not turns:
        raise InvalidRequest("input is empty", param="input")
    if request.instructions:
        turns.insert(0, Message("system", request.instructions))
    asked = replace(
        chat_asked(_chat(request, turns)),
        max_tokens_field="max_output_tokens",
        for_response=True,
    )
    if request.structured_outputs is None:
        asked = replace(asked, schema_field="text.format")
    store = request.store is not False
    return ResponseAsked(asked, items, _shown(request, asked, response_id, created_s, store), store)


def _tidy(body: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in body.items()
        if value is not None
        and not any(type(value) is type(known) and value == known for known in _HARMLESS.get(key, ()))
    }


def _chat(request: ResponseRequest, turns: Sequence[Message]) -> ChatRequest:
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    top = request.top_logprobs
    return ChatRequest(
        model=request.model,
        messages=list(turns),
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        structured_outputs=request.structured_outputs,
        logprobs=bool(top) or LOGPROBS in (request.include or ()) or None,
        top_logprobs=top or None,
        tools=[_tool(each) for each in request.tools] if request.tools else None,
        tool_choice=NamedToolChoice(FunctionChoice(choice.name), "function")
        if isinstance(choice, ResponseToolChoice)
        else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(text.format) if text and text.format else None,
        reasoning_effort=reasoning.effort if reasoning else None,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _tool(tool: Any) -> Tool:
    return Tool(Function(tool.name, tool.description, tool.parameters, tool.strict), "function")


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    if wanted.schema is None or wanted.name is None:
        raise InvalidRequest("json_schema needs name and schema", param="text.format")
    return ResponseFormat("json_schema", JsonSchema(wanted.name, wanted.schema, wanted.description, wanted.strict))


def _shown(request: ResponseRequest, asked: Asked, response_id: str, created_s: int, store: bool) -> Response:
    """Return the empty response, which repeats the request's options as OpenAI's API does."""
    plain = msgspec.to_builtins
    choice, text, reasoning = request.tool_choice, request.text, request.reasoning
    return Response(
        id=response_id,
        created_at=created_s,
        model=request.model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=ReasoningShown(reasoning.effort if reasoning else None),
        store=store,
        temperature=asked.sampling.temperature,
        top_p=asked.sampling.top_p,
        text=TextShown(plain(text.format) if text and text.format else {"type": "text"}),
        tool_choice=plain(choice) if choice else "auto",
        tools=[plain(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )
