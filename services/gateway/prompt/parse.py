"""From a body's bytes to what is asked, checked field by field. Pure; raises InvalidRequest that names the field."""

from dataclasses import dataclass, fields
from functools import partial

from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Sampling
from libs.model.chat import ChatMessage
from libs.model.sampling import SamplingDefaults
from services.gateway.prompt.fit import fit
from services.gateway.prompt.schema import ChatRequest, Common, CompletionRequest, Message
from services.gateway.prompt.unserved import drop_harmless

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for text completions; a chat goes on to the end of the context."""

_tidy_chat = partial(drop_harmless, served=frozenset(ChatRequest.__struct_fields__))
_tidy_completion = partial(drop_harmless, served=frozenset(CompletionRequest.__struct_fields__))
_ADVISED = tuple(field.name for field in fields(SamplingDefaults))

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked as far as that is possible without the model."""

    model: str
    messages: tuple[ChatMessage, ...]
    """Messages of a chat; empty for text completions."""
    prompts: tuple[Prompt, ...]
    """Prompts of text completions; empty for a chat."""
    n: int
    max_tokens: int | None
    max_tokens_field: str
    sampling: Sampling
    """Without a seed."""
    unset: frozenset[str]
    """Fields of `sampling` that the model's own advice fills."""
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def prompt_field(self) -> str:
        """Which field errors about the prompt name."""
        return "messages" if self.messages else "prompt"

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return self.n * max(len(self.prompts), 1)


def parse_chat(body: bytes) -> Asked:
    """Body of /v1/chat/completions."""
    request = fit(body, ChatRequest, _tidy_chat)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
    sampling = _sampling(request, logprobs=request.top_logprobs or 0 if request.logprobs else None)
    messages = tuple(_message(message, place) for place, message in enumerate(request.messages))
    return _asked(
        request,
        sampling,
        messages=messages,
        max_tokens=newer if newer is not None else older,
        max_tokens_field="max_tokens" if newer is None else "max_completion_tokens",
    )


def parse_completion(body: bytes) -> Asked:
    """Body of /v1/completions."""
    request = fit(body, CompletionRequest, _tidy_completion)
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, logprobs=request.logprobs)
    return _asked(request, sampling, prompts=_prompts(request.prompt), max_tokens=max_tokens)


def _asked(
    request: Common,
    sampling: Sampling,
    *,
    messages: tuple[ChatMessage, ...] = (),
    prompts: tuple[Prompt, ...] = (),
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
) -> Asked:
    stop, options = request.stop, request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    return Asked(
        model=request.model,
        messages=messages,
        prompts=prompts,
        n=request.n or 1,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        sampling=sampling,
        unset=frozenset(name for name in _ADVISED if getattr(request, name) is None),
        seed=request.seed,
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def _sampling(request: Common, *, logprobs: int | None) -> Sampling:
    """`logprobs`: how many alternatives to each token; None for no logprobs at all."""
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        ignore_eos=bool(request.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if not all(map(_is_token_id, biases)):
        key = next(key for key in biases if not _is_token_id(key))
        raise InvalidRequest(f"logit_bias: {quoted(key)} is no token id", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def _message(message: Message, place: int) -> ChatMessage:
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"a {message.role} message needs content", param=f"messages[{place}].content")
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    # "developer" is OpenAI's newer name of the role that models know as "system".
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text, **({"name": message.name} if message.name else {})}


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    tokens = [item for item in prompt if isinstance(item, int)]
    if not prompt or (tokens and len(tokens) < len(prompt)):
        raise InvalidRequest("prompt must be text, token ids, or a list of either", param="prompt")
    return (tokens,) if tokens else tuple(item for item in prompt if not isinstance(item, int))
