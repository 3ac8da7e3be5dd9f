"""The bodies, items and events of /v1/responses, as defined by OpenAI's API.

Decoding a body checks types and ranges.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from services.gateway.request.formats import ChatTokenLogprob, Notes
from services.gateway.request.schema import (
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
    AtLeastOne,
    Bias,
    Effort,
    FunctionName,
    Label,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Stops,
    StructuredOutputs,
    Temperature,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
)

MAX_INCLUDED = 8
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
ResponseId = Annotated[str, Meta(max_length=64)]


class ResponseTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Struct, forbid_unknown_fields=True):
    """The one tool that the model must call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Struct, forbid_unknown_fields=True):
    """The required form of the text: any text, any JSON object, or JSON of a named schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """The options for reasoning. `auto` is accepted, although no summary is ever written."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """The options of a stream. Padding is accepted but never sent."""

    include_obfuscation: bool | None = None


class ResponseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses.

    `top_k`, `min_p`, the penalties, `logit_bias`, `seed`, `stop`, `stop_token_ids`, `ignore_eos`,
    `structured_outputs` and `chat_template_kwargs` are extensions. `user`, `safety_identifier`, `prompt_cache_key`,
    `prompt_cache_retention` and vLLM's `session_id` have no effect.
    """

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDED)] | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Label] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    session_id: Label | None = None


class InputText(Struct, forbid_unknown_fields=True):
    """A piece of a message, a call's output or reasoning. Clients may send back all fields of an answer's piece."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputPart(Struct, forbid_unknown_fields=True):
    """A text or an image of a message. `detail` has no effect: the model's image processor decides."""

    type: Literal["input_text", "input_image", "output_text", "text", "reasoning_text", "summary_text"]
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessageItem(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    type: Literal["message"] = "message"
    id: Label | None = None
    status: str | None = None
    phase: str | None = None


class InputReasoning(Struct, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    id: Label | None = None
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    status: str | None = None


class InputCall(Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: str
    id: Label | None = None
    status: str | None = None


class InputCallOutput(Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: Label
    output: str | list[InputText]
    id: Label | None = None
    status: str | None = None


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, tag="output_text"):
    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, tag="reasoning_text"):
    text: str = ""


Part = OutputText | ReasoningText


class MessageItem(Struct, tag="message"):
    id: str
    status: Status = "in_progress"
    content: list[OutputText] = field(default_factory=list)
    role: str = "assistant"


class ReasoningItem(Struct, tag="reasoning"):
    """The model's reasoning as written, neither summarised nor encrypted."""

    id: str
    status: Status = "in_progress"
    content: list[ReasoningText] = field(default_factory=list)
    summary: list[Any] = field(default_factory=list)
    encrypted_content: None = None


class CallItem(Struct, tag="function_call"):
    """A tool call. `arguments` is the text of a JSON object."""

    id: str
    call_id: str
    name: str
    status: Status = "in_progress"
    arguments: str = ""


Item = MessageItem | ReasoningItem | CallItem


class CachedTokens(Struct):
    """The number of the input's tokens whose KV was found cached. Writing to the cache is not charged."""

    cached_tokens: int
    # The types of OpenAI's client for Python require it.
    cache_write_tokens: int = 0


class ReasoningTokens(Struct):
    """The number of the output's tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(Struct):
    """The reason why a response is incomplete."""

    reason: str


class ResponseError(Struct):
    code: str
    message: str


class ReasoningShown(Struct):
    """The request's options for reasoning, repeated in the response."""

    effort: str | None = None
    summary: str | None = None


class TextShown(Struct):
    """The request's options for the text, repeated in the response."""

    format: dict[str, Any]
    verbosity: str = "medium"


class Response(Struct, kw_only=True):
    """A response. `store` is true if it is stored once it has ended."""

    id: str
    object: str = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningShown
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextShown
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    x_fulcrum: Notes | UnsetType = UNSET


class Deleted(Struct):
    """The answer to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


class Whole(Struct, kw_only=True):
    """An event with the whole response in its current state."""

    type: str
    sequence_number: int = 0
    response: Response


class ItemEvent(Struct, kw_only=True):
    """The event that begins or ends an item."""

    type: str
    sequence_number: int = 0
    output_index: int
    item: Item


class PartEvent(Struct, kw_only=True):
    """The event that begins or ends a part of an item."""

    type: str
    sequence_number: int = 0
    item_id: str
    output_index: int
    content_index: int = 0
    part: Part


class TextDeltaEvent(Struct, kw_only=True, omit_defaults=True):
    """A further piece of a text. Only a message's has `logprobs`."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob] | None = None


class TextDone(Struct, kw_only=True, omit_defaults=True):
    """The whole of a text, once it has ended."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob] | None = None


class ArgumentsDelta(Struct, kw_only=True):
    """A further piece of a call's arguments."""

    type: str = "response.function_call_arguments.delta"
    sequence_number: int = 0
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Struct, kw_only=True):
    """The whole of a call's arguments, once they have ended."""

    type: str = "response.function_call_arguments.done"
    sequence_number: int = 0
    item_id: str
    output_index: int
    name: str
    arguments: str


Event = Whole | ItemEvent | PartEvent | TextDeltaEvent | TextDone | ArgumentsDelta | ArgumentsDone
