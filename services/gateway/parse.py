"""From a body's bytes to what is asked, checked field by field. Pure; raises InvalidRequest that names the field."""

import re
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from libs.contracts.errors import InvalidRequest, UnsupportedField
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import Sampling
from libs.model.chat import ChatMessage
from libs.model.sampling import SamplingDefaults
from services.gateway.schema import ChatRequest, Common, CompletionRequest, Message
from services.gateway.unserved import drop_harmless

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for text completions; a chat goes on to the end of the context."""

_ADVISED = tuple(field.name for field in fields(SamplingDefaults))

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, checked as far as that is possible without the model."""

    model: str
    messages: tuple[ChatMessage, ...]
    """Of a chat; empty for text completions."""
    prompts: tuple[Prompt, ...]
    """Of text completions; empty for a chat."""
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
    request = _decode(body, ChatRequest)
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
    request = _decode(body, CompletionRequest)
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
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in biases):
        raise InvalidRequest("logit_bias must be keyed by token ids", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


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


# ------------------------------------------------------------ decoding

_R = TypeVar("_R", bound=Common)
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_NOT_FINITE = re.compile(
    rb'"([a-z_]{1,64})"\s*:\s*(?:\{[^{}]{0,256}:\s*)?(?:NaN|-?Infinity|-?[0-9.]{1,32}[eE]\+?[0-9]{3,})'
)
"""A field, or a flat object under one, with a number that is none or too large."""
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"contains unknown field `([^`]*)`")


def _decode(body: bytes, kind: type[_R]) -> _R:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        return _second_look(body, kind, error)
    except _NO_JSON as error:
        raise _malformed(body, error) from None


def _second_look(body: bytes, kind: type[_R], first: msgspec.ValidationError) -> _R:
    """Clients send null or a default for fields they do not use: those are dropped before the verdict."""
    try:
        plain: Any = msgspec.json.decode(body)
    except msgspec.ValidationError as error:  # without a type to fit: a number out of range
        raise _malformed(body, error) from None
    except _NO_JSON:
        raise _explain(str(first)) from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object", param="body")
    try:
        return msgspec.convert(drop_harmless(plain, frozenset(kind.__struct_fields__)), kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except RecursionError:
        raise _explain(str(first)) from None


def _malformed(body: bytes, error: Exception) -> InvalidRequest:
    if not_finite := _NOT_FINITE.search(body):
        name = not_finite[1].decode()
        return InvalidRequest(f"{name} is not a finite number", param=name)
    return InvalidRequest(f"the body is not JSON in UTF-8: {error}", param="body")


def _explain(text: str) -> InvalidRequest:
    place = _PLACE.search(text)
    path = place[1].removesuffix("[...]") if place else ""
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    named = unknown or missing
    if named is not None:
        path = f"{path}.{named[1]}" if path else named[1]
    if unknown is not None:
        return UnsupportedField(f"{path or 'a field without a name'} is not served", param=path or "body")
    if missing is not None:
        return InvalidRequest(f"{path} is missing", param=path)
    reason = text[: place.start()] if place else text
    return InvalidRequest(f"{path or 'body'}: {reason[:1].lower()}{reason[1:]}", param=path or "body")
