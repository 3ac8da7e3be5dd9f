"""Responses, their items and the events of their streams, as defined by OpenAI's API."""

from typing import Any, Literal

from msgspec import Struct, field

from services.gateway.request.formats import ChatTokenLogprob

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
    """The number of the input's tokens whose KV was found cached."""

    cached_tokens: int


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
    """A response. `store` says whether it is stored once it has ended."""

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


class TextDelta(Struct, kw_only=True, omit_defaults=True):
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


Event = Whole | ItemEvent | PartEvent | TextDelta | TextDone | ArgumentsDelta | ArgumentsDone
