"""The bodies of the two completion routes, as defined by OpenAI's API. Decoding checks types and ranges."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

# OpenAI's API takes 4 and vLLM any number; vLLM's users send lists of beginnings of code.
MAX_STOPS = 64
MAX_STOP_CHARS = 256
# Over all stop strings of a request: each token's text is compared with every beginning of each of them.
MAX_STOPS_CHARS = 1024
MAX_TOP_LOGPROBS = 20
# The bound for one prompt in OpenAI's API. A gateway's settings may lower it.
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
PartType = Literal["text"]
MAX_TOOLS = 128
# The bound for one message.
MAX_CALLS = 128
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
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
    `user`, `metadata`, `safety_identifier` and `prompt_cache_key` have no effect.
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


class TextPart(Struct, forbid_unknown_fields=True):
    """A text part of a message. `cache_control`, Anthropic's mark of a prefix to cache, has no effect: all prefixes
    are cached.
    """

    type: PartType
    text: str
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
    content: str | list[TextPart] | None = None
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
    """The one tool that the model has to call."""

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
    the prompt itself.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
