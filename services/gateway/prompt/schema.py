"""Bodies of the two completion routes, as OpenAI's API has them. Types and ranges are checked while decoding."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
"""Of one prompt, as in OpenAI's API; a gateway's settings may allow fewer."""

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
Role = Literal["system", "developer", "user", "assistant"]
PartType = Literal["text"]
Label = Annotated[str, Meta(max_length=512)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream carries beside text. `continuous_usage_stats` is vLLM's: with `include_usage`, every chunk has the
    tokens so far of the prompt and of the choice that it is of."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both routes share. `top_k` (0 or -1 is off), `min_p` (0 is off), `repetition_penalty` (1 is off) and
    `ignore_eos` are extensions; `user`, `metadata`, `safety_identifier` and `prompt_cache_key` change nothing."""

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
    user: Label | None = None
    metadata: dict[str, Label] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None


class TextPart(Struct, forbid_unknown_fields=True):
    """A piece of a message."""

    type: PartType
    text: str


class Message(Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class CompletionRequest(Common, kw_only=True):
    """Body of POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: TopLogprobs | None = None
