"""The bodies, messages and events of /v1/messages and its count_tokens, as defined by Anthropic's API.

Decoding a body checks types and ranges.
"""

from typing import Annotated, Any, Final, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field

from services.gateway.request.formats import Declared, Notes
from services.gateway.request.schema import MAX_TOOLS, AtLeastOne, KnownValues, Label, Stops, Temperature, TopP

PATH: Final = "/v1/messages"
COUNT_PATH: Final = f"{PATH}/count_tokens"
MAX_TOOL_NAME_CHARS: Final = 128
ToolName = Annotated[str, Meta(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=512)]
Mark = dict[str, Any] | None
"""The `cache_control` of a block. It has no effect, because every prefix is cached."""


IMAGE_SOURCES: Final = ("base64", "url")
ImageType = Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class TextBlock(Struct, tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Mark = None
    citations: list[Any] | None = None


class Base64Source(Struct, tag="base64", forbid_unknown_fields=True):
    media_type: ImageType
    data: str


class UrlSource(Struct, tag="url", forbid_unknown_fields=True):
    url: str


class ImageBlock(Struct, tag="image", forbid_unknown_fields=True):
    source: Base64Source | UrlSource
    cache_control: Mark = None


class ThinkingBlock(Struct, tag="thinking", forbid_unknown_fields=True):
    """Reasoning of an earlier answer. Signatures are not checked, since reasoning is not encrypted here."""

    thinking: str
    signature: str | None = None
    cache_control: Mark = None


class RedactedThinkingBlock(Struct, tag="redacted_thinking", forbid_unknown_fields=True):
    """Reasoning that only Anthropic can read. It is left out of the prompt."""

    data: str
    cache_control: Mark = None


class ToolUseBlock(Struct, tag="tool_use", forbid_unknown_fields=True):
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: Mark = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Struct, tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: CallId
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Mark = None


InputBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCK_TYPES: Final = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


MessageRole = Literal["user", "assistant", "system"]


class InputMessage(Struct, forbid_unknown_fields=True):
    role: MessageRole
    content: str | list[InputBlock]


class MessageTool(Struct, forbid_unknown_fields=True):
    """A tool of the client's own. The fields after `cache_control` have no effect."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Mark = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


ChoiceType = Literal["auto", "any", "tool", "none"]


class MessageToolChoice(Struct, forbid_unknown_fields=True):
    type: ChoiceType
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


ThinkingType = Literal["enabled", "disabled", "adaptive"]


class ThinkingOptions(Struct, forbid_unknown_fields=True):
    """The option that makes the model reason. `adaptive` leaves the choice to the chat template; a budget has no
    effect.
    """

    type: ThinkingType
    budget_tokens: AtLeastOne | None = None
    display: str | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


EffortName = Literal["low", "medium", "high", "xhigh", "max"]


class OutputOptions(Struct, forbid_unknown_fields=True):
    effort: EffortName | None = None
    format: OutputFormat | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """The client's metadata. `user_id` has no effect: a tenant is identified by its key."""

    user_id: Label | None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens, and the fields that /v1/messages shares with it.

    `context_management` has no effect: no context is edited. `output_format` is the name of `output_config.format`
    that SDKs of 2025 send.
    """

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None
    context_management: dict[str, Any] | None = None
    cache_control: Mark = None


class MessageRequest(CountRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: AtLeastOne
    stop_sequences: Stops | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None


_VALUES: Final = {
    "role": get_args(MessageRole),
    "tool_choice.type": get_args(ChoiceType),
    "thinking.type": get_args(ThinkingType),
    "output_config.effort": get_args(EffortName),
    "output_config.format.type": ("json_schema",),
    "output_format.type": ("json_schema",),
}


def known_values(path: str) -> KnownValues | None:
    """Return the accepted values of the field at a path, or None if any value is accepted."""
    found = _VALUES.get("role" if path.endswith("].role") else path)
    return None if found is None else (found, frozenset())


class TextOut(Struct, tag="text"):
    text: str = ""


class ThinkingOut(Struct, tag="thinking"):
    """The model's reasoning as written. The signature is always empty."""

    thinking: str = ""
    signature: str = ""


class ToolUseOut(Struct, tag="tool_use"):
    """A tool call. `input` is the object that the model wrote, or empty if it wrote something else."""

    id: str
    name: str
    input: Any = field(default_factory=dict)


OutputBlock = TextOut | ThinkingOut | ToolUseOut
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Struct):
    """The tokens of a message. Input tokens exclude those whose KV was found cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageOut(Struct, tag="message", kw_only=True):
    """A whole answer. In a stream's first event it has neither content nor a stop reason."""

    id: str
    role: str = "assistant"
    model: str
    content: list[OutputBlock] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    x_fulcrum: Notes | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int


class MessageErrorBody(Struct):
    """`code` and `param` are those of the other routes' errors, beside the fields of Anthropic's API."""

    type: str
    message: str
    code: str
    param: str | None


class MessageErrorReply(Struct, tag="error"):
    """The body of every error response of the messages routes, and the data of an error in a stream."""

    error: MessageErrorBody
    request_id: str | None = None


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, tag="input_json_delta"):
    partial_json: str


class StopDelta(Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageStart(Struct, tag="message_start"):
    message: MessageOut


class Ping(Struct, tag="ping"):
    pass


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: OutputBlock


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class MessageDelta(Struct, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    x_fulcrum: Notes | UnsetType = UNSET


class MessageStop(Struct, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageErrorReply

MESSAGE_ROUTES: Final = (
    Declared(PATH, "Answer a chat as a message of Anthropic's API.", MessageRequest, MessageOut, MessageErrorReply),
    Declared(
        COUNT_PATH,
        "Count a message's input tokens.",
        CountRequest,
        TokenCount,
        MessageErrorReply,
        streams=False,
        tag="tokens",
    ),
)
