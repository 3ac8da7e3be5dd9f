"""Answers of the two completion routes, as OpenAI's API has them."""

from typing import Generic, TypeVar

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Of the prompt's tokens, those whose KV was found cached."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the answers' tokens, those of reasoning."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of all prompts and all choices. Details of the completion are there where the model reasons."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Details(Struct):
    """Who served the first choice and how fast: an extension, for requests with x-fulcrum-details: 1."""

    prefill_worker: str
    decode_worker: str | None
    """None when the first token was the last."""
    ttft_ms: float
    tpot_ms: float | None
    queue_ms: float


class ChatTopLogprob(Struct):
    """An alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    """Of a choice or of a piece of one."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionDelta(Struct, omit_defaults=True):
    """What a chunk adds to a call: in its first, the name."""

    name: str = ""
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """A piece of a call; `id` and `type` stand in its first."""

    index: int | None = None
    id: str = ""
    type: str = ""
    function: FunctionDelta | None = None


class Delta(Struct, omit_defaults=True):
    """What a chunk adds. `reasoning` is `reasoning_content` under its newer name."""

    role: str = ""
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    """One choice in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class FunctionOut(Struct):
    """What is called; `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class ToolCallOut(Struct):
    """A call."""

    id: str
    function: FunctionOut
    type: str = "function"


class ChatMessageOut(Struct):
    """A whole answer. Reasoning and calls are there where the model wrote some; content is null beside calls alone."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class ChatChoice(Struct):
    """One choice in a whole answer."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class PromptLogprob(Struct):
    """Of a token in its place in a prompt, as vLLM shows it: `rank` 1 is the likeliest, null beyond what was asked."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of a prompt; the first has none."""


class CompletionLogprobs(Struct):
    """Of a choice or of a piece of one, aligned lists. The first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One choice, whole or in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT")


class Envelope(Struct, Generic[ChoiceT]):
    """What every answer and chunk is wrapped in."""

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
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    """Every error of every route."""

    error: ErrorBody
