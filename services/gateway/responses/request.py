"""Conversion of a response request into a chat request, and the stored responses that later requests continue.

Conversion is pure. Errors are InvalidRequest and name the field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from msgspec import to_builtins

from libs.contracts.errors import InvalidRequest, ResponseNotFound, StoreUnavailable, UnsupportedField, quoted
from libs.keys.gate import caller_of
from libs.stores.responses import ResponsesDown, ResponseStore
from services.gateway.request.formats import Declared
from services.gateway.request.harmless import COMMON_DEFAULTS, drop_defaults, refusal_as_text, tidy_tool
from services.gateway.request.parse import ParsedRequest, convert_chat, read_headers
from services.gateway.request.schema import (
    MAX_CALLS,
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
from services.gateway.responses.schema import (
    ENCRYPTED,
    LOGPROBS,
    Deleted,
    InputCall,
    InputCallOutput,
    InputMessageItem,
    InputPart,
    InputReasoning,
    InputText,
    ReasoningShown,
    Response,
    ResponseRequest,
    ResponseToolChoice,
    TextFormat,
    TextShown,
)

Item = InputMessageItem | InputReasoning | InputCall | InputCallOutput
_KINDS: Final[Mapping[str, type[Item]]] = {
    "message": InputMessageItem,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
}
MAX_REASON_CHARS = 200


def read_items(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert the input items into turns. Consecutive reasoning, text and calls become one turn of the assistant."""
    if isinstance(given, str):
        return [Message("user", given)]
    turns: list[Message] = []
    for place, plain in enumerate(given):
        item, where = _item(plain, f"input[{place}]"), f"input[{place}]"
        if isinstance(item, InputMessageItem) and item.role != "assistant":
            turns.append(Message(item.role, _content(item, where)))
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
    given = {key: value for key, value in plain.items() if value is not None}
    if given.get("role") == "assistant" and isinstance(given.get("content"), list):
        given["content"] = [refusal_as_text(part, "output_text") for part in given["content"]]
    try:
        return msgspec.convert(given, struct)
    except msgspec.ValidationError as error:
        raise _explained(str(error), where) from None


def _explained(text: str, where: str) -> InvalidRequest:
    reason, _, path = text.partition(" - at `$")
    kind = UnsupportedField if "unknown field" in reason or "Invalid enum value" in reason else InvalidRequest
    field = f"{where}{path.rstrip('`')}"[:MAX_REASON_CHARS]
    return kind(f"{field}: {reason[:1].lower()}{reason[1:MAX_REASON_CHARS]}", param=field)


def _answer(turns: list[Message], item: InputMessageItem | InputReasoning | InputCall, where: str) -> None:
    """Add an item to the assistant's last turn if it belongs to the same answer. Otherwise begin a new turn."""
    last = turns[-1] if turns and turns[-1].role == "assistant" else None
    if last is None or (not isinstance(item, InputCall) and (last.content or last.tool_calls)):
        last = Message("assistant")
        turns.append(last)
    if isinstance(item, InputMessageItem):
        last.content = _content(item, where)
    elif isinstance(item, InputReasoning):
        last.reasoning_content = (last.reasoning_content or "") + _text(item.content or item.summary or [])
    else:
        calls = last.tool_calls = last.tool_calls or []
        if len(calls) >= MAX_CALLS:
            raise InvalidRequest(f"{where}: one answer has {MAX_CALLS} calls at most", param=where)
        calls.append(ToolCall(item.call_id, CalledFunction(item.name, item.arguments)))


def _content(item: InputMessageItem, where: str) -> str | list[ContentPart]:
    """Return a message's text, or its parts if there are images."""
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part, item.role, f"{where}.content[{at}]") for at, part in enumerate(item.content)]
    if any(part.image_url for part in parts):
        return parts
    return "".join(part.text or "" for part in parts)


def _part(part: InputPart, role: str, where: str) -> ContentPart:
    image = part.type == "input_image"
    named, other, given = ("image_url", "text", part.image_url) if image else ("text", "image_url", part.text)
    if given is None:
        raise InvalidRequest(f"{where}.{named} is missing", param=f"{where}.{named}")
    if (part.text if image else part.image_url) is not None:
        raise InvalidRequest(f"{where}: a part of type {part.type} has no {other}", param=f"{where}.{other}")
    if not image:
        return ContentPart("text", given)
    if role != "user":
        raise InvalidRequest(f"{where}: only a user's messages may contain images", param=f"{where}.type")
    return ContentPart("image_url", image_url=ImageUrl(given))


def _image_fields(items: Sequence[Mapping[str, Any]], earlier: int) -> list[str]:
    """Return the field of each image in `items`. The first `earlier` items come from the previous response."""
    return [
        f"input[{place - earlier}].content[{at}].image_url" if place >= earlier else "previous_response_id"
        for place, item in enumerate(items)
        if isinstance(item.get("content"), list)
        for at, part in enumerate(item["content"])
        if part.get("type") == "input_image"
    ]


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Fields that are not served, with the values besides null that request the default behaviour.
_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    **{name: values for name, values in COMMON_DEFAULTS.items() if name not in ResponseRequest.__struct_fields__},
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
}
_INCLUDED: Final = (LOGPROBS, ENCRYPTED)
Items = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedResponseRequest:
    """A response request converted to a chat request, with the response to fill."""

    parsed: ParsedRequest
    items: Items
    """The whole conversation's input items, including those of earlier responses."""
    shown: Response
    """The response without any output."""
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


def build_response_request(
    request: ResponseRequest, earlier: Items, response_id: str, created_s: int
) -> ParsedResponseRequest:
    """Convert a request. `earlier` contains the items of the conversation before this request."""
    own = request.input
    items = [*earlier, *([{"role": "user", "content": own}] if isinstance(own, str) else own)]
    turns = read_items(items)
    if not turns:
        raise InvalidRequest("input is empty", param="input")
    if request.instructions:
        turns.insert(0, Message("system", request.instructions))
    parsed = replace(
        convert_chat(_chat(request, turns)),
        max_tokens_field="max_output_tokens",
        ordered=True,
        chat_field="input",
    )
    if parsed.images:
        fields = _image_fields(items, len(earlier))
        images = [image._replace(field=field) for image, field in zip(parsed.images, fields, strict=True)]
        parsed = replace(parsed, images=tuple(images))
    if request.structured_outputs is None:
        parsed = replace(parsed, schema_field="text.format")
    store = request.store is not False
    return ParsedResponseRequest(parsed, items, _shown(request, parsed, response_id, created_s, store), store)


def _tidy(body: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tools := body.get("tools"), list):
        body = {**body, "tools": [tidy_tool(each) for each in tools]}
    return drop_defaults(body, _HARMLESS)


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
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        stop_token_ids=request.stop_token_ids,
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


def _shown(request: ResponseRequest, parsed: ParsedRequest, response_id: str, created_s: int, store: bool) -> Response:
    """Return a response without output, which repeats the request's options as in OpenAI's API."""
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
        temperature=parsed.sampling.temperature,
        top_p=parsed.sampling.top_p,
        text=TextShown(plain(text.format) if text and text.format else {"type": "text"}),
        tool_choice=plain(choice) if choice else "auto",
        tools=[plain(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        user=request.user,
    )


_AWAY = "where responses are kept does not answer"
RETRY_AFTER_S = 1.0


class _StoredResponse(msgspec.Struct):
    items: list[Any]
    response: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The stored responses. Each is stored for `keep_s` seconds; 0 stores none."""

    store: ResponseStore
    keep_s: int
    home: Callable[[str], str] = str
    """A function that returns the name under which a tenant's responses are stored.

    The name changes when the tenant is deleted, so that a later tenant of the same name cannot read them.
    """

    async def keep(self, tenant: str, items: Items, response: Response) -> bool:
        """Store a response. Return False if that fails, in which case the client still gets its answer."""
        if not self.keep_s:
            return False
        value = msgspec.json.encode({"items": items, "response": response})
        try:
            return await self.store.keep(self.home(tenant), response.id, value, self.keep_s)
        except ResponsesDown:
            return False

    async def items(self, tenant: str, response_id: str) -> Items:
        """Return the conversation up to and including a response. Raise ResponseNotFound or StoreUnavailable."""
        kept = await self._kept(tenant, response_id, "previous_response_id")
        items: Items = [*kept.items, *kept.response.get("output", ())]
        return items

    async def response(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Return a completed response. Raise ResponseNotFound or StoreUnavailable."""
        found: dict[str, Any] = (await self._kept(tenant, response_id, "response_id")).response
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response. Raise ResponseNotFound or StoreUnavailable."""
        try:
            found = await self.store.delete(self.home(tenant), response_id)
        except ResponsesDown:
            raise StoreUnavailable(_AWAY, retry_after_s=RETRY_AFTER_S) from None
        if not found:
            raise _absent(response_id, "response_id")

    async def _kept(self, tenant: str, response_id: str, field: str) -> _StoredResponse:
        try:
            value = await self.store.get(self.home(tenant), response_id)
        except ResponsesDown:
            raise StoreUnavailable(_AWAY, retry_after_s=RETRY_AFTER_S) from None
        if value is None:
            raise _absent(response_id, field)
        try:
            return msgspec.json.decode(value, type=_StoredResponse)
        except msgspec.MsgspecError:  # another tenant's
            raise _absent(response_id, field) from None


def _absent(response_id: str, field: str) -> ResponseNotFound:
    return ResponseNotFound(f"response {quoted(response_id)} is not kept", param=field)


RESPONSE_ROUTES: Final = (
    Declared("/v1/responses", "Answer a chat as a response that others can go on from.", ResponseRequest, Response),
)
_ABSENT: dict[int | str, dict[str, Any]] = {404: {"description": "No response of this tenant is kept under this id."}}


def make_responses_router(kept: StoredResponses) -> APIRouter:
    """Return the router for stored responses.

    Responses of other tenants do not exist for a caller, even for operators and admins.
    """
    router = APIRouter(prefix="/v1/responses", tags=["responses"])

    @router.get("/{response_id}", summary="Get a kept response.", responses=_ABSENT)
    async def get(response_id: str, request: Request) -> dict[str, Any]:
        """Return the response as it ended."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedField("stream: a stored response is not streamed again", param="stream")
        return await kept.response(_tenant(request), response_id)

    @router.delete("/{response_id}", summary="Delete a kept response.", responses=_ABSENT)
    async def delete(response_id: str, request: Request) -> dict[str, Any]:
        """Delete the response. No further response can continue it."""
        await kept.delete(_tenant(request), response_id)
        found: dict[str, Any] = to_builtins(Deleted(response_id))
        return found

    return router


def _tenant(request: Request) -> str:
    return read_headers(dict(request.scope["headers"]), caller_of(request.scope)).tenant
