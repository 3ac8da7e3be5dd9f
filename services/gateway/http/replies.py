"""The answers of the two completion routes, as defined by OpenAI's API."""

from typing import Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """The number of the prompt's tokens whose KV was found cached."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """The number of the answers' tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """The tokens of all prompts and all choices. Completion details are present if the model reasons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Details(Struct):
    """The workers that served the first choice and their timings: an extension, sent for x-fulcrum-details: 1."""

    prefill_worker: str
    decode_worker: str | None
    """The decode worker; None if the first token was the last."""
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float


class ChatTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionDelta(Struct, omit_defaults=True):
    """The part of a call that a chunk adds. Only the first carries the name."""

    name: str = ""
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """A piece of a tool call. Only the first carries `id` and `type`."""

    index: int | None = None
    id: str = ""
    type: str = ""
    function: FunctionDelta | None = None


class Delta(Struct, omit_defaults=True):
    """The content that a chunk adds. `reasoning` repeats `reasoning_content` under its newer name."""

    role: str = ""
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class FunctionOut(Struct):
    """A called function. `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class ToolCallOut(Struct):
    id: str
    function: FunctionOut
    type: str = "function"


class ChatMessageOut(Struct):
    """A whole answer. Reasoning and calls are present if the model wrote any; content is null beside calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(Struct):
    """The logprob of a token at its position in a prompt, as vLLM shows it.

    `rank` 1 is the likeliest token. It is null for tokens beyond the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each token of a prompt, by token id. The first token has none."""


class CompletionLogprobs(Struct):
    """The logprobs of a choice or of a piece of one, as aligned lists. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT")


class Envelope(Struct, Generic[ChoiceT]):
    """The fields around the choices of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    fulcrum: Details | UnsetType = UNSET


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    """The body of every error response, on every route."""

    error: ErrorBody
