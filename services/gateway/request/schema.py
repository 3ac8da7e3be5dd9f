"""The request bodies of OpenAI's API, and their decoding. Pure.

Decoding checks types and ranges. Its errors name the faulty field.
"""

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from libs.contracts.errors import MAX_QUOTED_CHARS, InvalidRequest, UnsupportedField, quoted

# OpenAI's API allows 4, and vLLM any number. Users of vLLM send lists of code keywords as stop strings.
MAX_STOPS = 64
MAX_STOP_CHARS = 256
# The bound on the length of all stop strings of a request, because each token's text is compared with all their
# prefixes.
MAX_STOPS_CHARS = 1024
MAX_TOP_LOGPROBS = 20
# The bound per prompt in OpenAI's API. A gateway's settings may lower it.
MAX_CHOICES = 128

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
PartType = Literal["text", "image_url"]
MAX_TOOLS = 128
# The bound per message.
MAX_CALLS = 128
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MAX_STOP_TOKEN_IDS = 64
Label = Annotated[str, Meta(max_length=512)]


MAX_PATTERN_CHARS = 16 * 1024
MAX_ANSWER_CHOICES = 1024
Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]
Choice = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]],
    Meta(min_length=1, max_length=MAX_ANSWER_CHOICES),
]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """The extra data that a stream carries.

    `continuous_usage_stats` is vLLM's: with `include_usage`, every chunk has the tokens so far of the prompt and of
    its choice.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's constraints, of which a request sets one. `grammar` is GBNF (`::=`) or llguidance's Lark dialect."""

    grammar: Pattern | None = None
    json: str | dict[str, Any] | None = None
    regex: Pattern | None = None
    choice: Choice | None = None
    json_object: bool | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both routes share.

    `top_k` (0 or -1 is off), `min_p` (0 is off), `repetition_penalty` (1 is off), `ignore_eos`, `min_tokens`,
    `stop_token_ids`, `structured_outputs`, `guided_*`, `prompt_logprobs` and `return_token_ids` are extensions.
    `user`, `metadata`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention` and vLLM's `session_id` have
    no effect.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    max_tokens: AtLeastOne | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choice | None = None
    guided_grammar: Pattern | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None
    user: Label | None = None
    metadata: dict[str, Label] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    session_id: Label | None = None


class ImageUrl(Struct, forbid_unknown_fields=True):
    """An image as a data URL. `detail` has no effect: the model's image processor decides."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A text or an image of a message. `cache_control`, Anthropic's mark of a prefix to cache, has no effect: all
    prefixes are cached.
    """

    type: PartType
    text: str | None = None
    image_url: ImageUrl | None = None
    cache_control: dict[str, Any] | None = None


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: FunctionName
    arguments: str


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call in an earlier answer. `index` is copied from streams by clients and has no effect here."""

    id: Label
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One turn of a chat. `reasoning_content` and `reasoning` are for templates that read earlier reasoning; `id` has
    no effect.
    """

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    id: Label | None = None
    cache_control: dict[str, Any] | None = None


class Function(Struct, forbid_unknown_fields=True):
    """A function that the model may call. `parameters` is the JSON schema of one object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"]
    cache_control: dict[str, Any] | None = None


class FunctionChoice(Struct, forbid_unknown_fields=True):
    name: FunctionName


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    """The one tool that the model must call."""

    function: FunctionChoice
    type: Literal["function"]


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A schema that the answer follows, whether `strict` is set or not."""

    name: FunctionName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The required form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Common, kw_only=True):
    """The body of POST /v1/chat/completions.

    `chat_template_kwargs` (variables of the chat template), `include_reasoning`, `add_generation_prompt` (both true
    by default) and `continue_final_message` are vLLM's.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a `prompt`, or `messages` and the other fields that a chat template reads."""

    model: str
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    tokens: list[TokenId]


class CompletionRequest(Common, kw_only=True):
    """The body of POST /v1/completions.

    `prompt` is text, token ids, or a list of either. `max_tokens` may be 0 if `echo` or `prompt_logprobs` requests
    the prompt itself. `response_format` is vLLM's.
    """

    prompt: str | list[str | int | list[int]]
    response_format: ResponseFormat | None = None
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None


UNSERVED_ROLES: Final = frozenset({"function"})
UNSERVED_PARTS: Final = frozenset({"input_audio", "file", "refusal"})
"""The types of message parts in OpenAI's API that are not served."""


MAX_REASON_CHARS = 200
_T = TypeVar("_T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
# A field whose value, or a value in a flat object in it, is NaN, infinite or too large.
_NOT_FINITE = re.compile(
    rb'"([a-z_]{1,64})"\s*:\s*(?:\{[^{}]{0,256}:\s*)?(?:NaN|-?Infinity|-?[0-9.]{1,32}[eE]\+?[0-9]{3,})'
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")
_ENUM = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
KnownValues = tuple[tuple[str, ...], frozenset[str]]
"""The accepted values of a field, and further values of its API that are not served."""
_ALLOWED: dict[str, KnownValues] = {
    "role": (get_args(Role), UNSERVED_ROLES),
    "type": (get_args(PartType), UNSERVED_PARTS),
    "reasoning_effort": (get_args(Effort), frozenset()),
    "tool_choice": (("none", "auto", "required"), frozenset()),
}
"""The accepted values in OpenAI's API, by the last part of a field's path."""
_UNSERVED_TOOLS = frozenset(
    {"custom", "allowed_tools", "web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"}
    | {"computer_use_preview", "image_generation", "local_shell", "shell", "apply_patch"}
)
_TOOL_TYPES = (("function",), _UNSERVED_TOOLS)


def fit(
    body: bytes,
    kind: type[_T],
    tidy: Callable[[dict[str, Any]], dict[str, Any]],
    values: Callable[[str], KnownValues | None] | None = None,
) -> _T:
    """Decode a body. Raise InvalidRequest if it is invalid.

    `tidy` removes fields without effect, and is called only after decoding has failed. `values` returns the accepted
    values of a field, given its path, for bodies of other APIs.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _second_look(body, kind, error, tidy, values or _allowed)
    except _NO_JSON as error:
        raise _malformed(body, error) from None


def _second_look(
    body: bytes,
    kind: type[_T],
    first: msgspec.ValidationError,
    tidy: Callable[[dict[str, Any]], dict[str, Any]],
    values: Callable[[str], KnownValues | None],
) -> _T:
    # Clients send null or a default for fields that they do not use. Remove these before rejecting the body.
    try:
        plain: Any = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # not a mismatch of types: a number out of range
        raise _malformed(body, error) from None
    except _NO_JSON:
        raise _explain(str(first), kind, {}, values) from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    try:
        # Defaults are compared by type, so floats without a fraction become integers first.
        return msgspec.convert(tidy(_whole_numbers(plain)), kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, plain, values) from None
    except RecursionError:
        raise _explain(str(first), kind, {}, values) from None


def _whole_numbers(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with floats such as 16.0 as integers, which both integer and float fields accept."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in body.items()
    }


def _malformed(body: bytes, error: Exception) -> InvalidRequest:
    if not body.strip():
        return InvalidRequest("the body is empty: send a JSON object", param="body")
    if not_finite := _NOT_FINITE.search(body):
        name = not_finite[1].decode()
        return InvalidRequest(f"{name} is not a finite number", param=name)
    if _SURROGATE.search(body) and _is_json_otherwise(body):
        text = r"the body has half a surrogate pair (\ud800 to \udfff without its other half), which is no character"
        return InvalidRequest(text, param="body")
    return InvalidRequest(f"the body is not JSON in UTF-8: {_cut(str(error), MAX_REASON_CHARS)}", param="body")


def _is_json_otherwise(body: bytes) -> bool:
    # The standard library accepts an unpaired surrogate.
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _explain(
    text: str, kind: type[msgspec.Struct], plain: dict[str, Any], values: Callable[[str], KnownValues | None]
) -> InvalidRequest:
    place = _PLACE.search(text)
    path = place[1] if place else ""
    key = _key_at_fault(path.removesuffix("[...]"), kind, plain) if path.endswith("[...]") else ""
    path = _cut(path.removesuffix("[...]"), MAX_QUOTED_CHARS)
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    named = unknown or missing
    if named is not None:
        name = _cut(named[1], MAX_QUOTED_CHARS)
        path = f"{path}.{name}" if path else name
    if unknown is not None:
        return UnsupportedField(f"{path or 'a field without a name'} is not served", param=path or "body")
    if missing is not None:
        return InvalidRequest(f"{path} is missing", param=path)
    if (found := _ENUM.match(text)) and (known := values(path)):
        return _not_allowed(found[1], path, *known)
    reason = _cut(text[: place.start()] if place else text, MAX_REASON_CHARS)
    where = f"{path}[{key}]" if key else path or "body"
    return InvalidRequest(f"{where}: {reason[:1].lower()}{reason[1:]}", param=path or "body")


def _key_at_fault(field: str, kind: type[msgspec.Struct], plain: dict[str, Any]) -> str:
    """Return the quoted key of the first value that does not fit, or an empty string if all fit."""
    entries, hint = plain.get(field), get_type_hints(kind, include_extras=True).get(field)
    if not isinstance(entries, dict) or hint is None:
        return ""
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, hint)
        except msgspec.ValidationError:
            return quoted(key)
    return ""


def _not_allowed(value: str, path: str, allowed: tuple[str, ...], unserved: frozenset[str]) -> InvalidRequest:
    choices = f"served {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}"
    if value in unserved:
        return UnsupportedField(f"{path}: {value!r} is not served; {choices}", param=path)
    return InvalidRequest(f"{path}: {quoted(value)} is not known; {choices}", param=path)


def _allowed(path: str) -> KnownValues | None:
    if path in ("response_format.type", "text.format.type"):
        return ("text", "json_object", "json_schema"), frozenset({"grammar", "python", "structural_tag"})
    return _TOOL_TYPES if "tool" in path and path.endswith(".type") else _ALLOWED.get(path.rpartition(".")[2])


def _cut(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."
