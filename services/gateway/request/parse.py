"""Parsing of a request's headers and body, with all checks that need no model. Pure.

Errors are InvalidRequest and name the faulty field.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from libs.contracts.classes import DEFAULT_CLASS
from libs.contracts.errors import InvalidRequest, UnsupportedField, quoted
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import RequestContext, Sampling
from libs.keys.book import ANY
from libs.keys.table import ANYBODY, CLASS_HEADER, TENANT_HEADER, Caller, named_in
from libs.model.chat import ChatMessage
from libs.model.grammar import InvalidGrammar, choice_rule, grammar_rule, pattern_rule
from libs.model.info import SamplingDefaults
from services.gateway.images.files import SentImage
from services.gateway.request.chat import ToolUse, chat_message, sent_images, tool_use
from services.gateway.request.harmless import tidy_chat, tidy_completion, tidy_detokenize, tidy_tokenize
from services.gateway.request.schema import (
    MAX_STOPS_CHARS,
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
    fit,
)

MAX_TARGET_MS = 24 * 3_600_000

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values used for absent headers, and the lowest latency targets that a request may set."""

    gateway_id: str
    ttft_deadline_ms: float
    tpot_target_ms: float
    tightest: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The lowest TTFT and TPOT targets in ms by class (ANY for all others). Lower requested targets are raised."""


@dataclass(frozen=True, slots=True)
class Headers:
    request_id: str
    """The id that the client sent, or an empty string."""
    tenant: str
    service_class: str
    ttft_deadline_ms: float | None
    tpot_target_ms: float | None
    traceparent: str
    details: bool

    def context(self, arrival_ns: int, defaults: Defaults) -> RequestContext:
        bounds = defaults.tightest
        least_ttft_ms, least_tpot_ms = bounds.get(self.service_class) or bounds.get(ANY) or (0.0, 0.0)
        ttft_ms = max(self.ttft_deadline_ms or defaults.ttft_deadline_ms, least_ttft_ms)
        tpot_ms = max(self.tpot_target_ms or defaults.tpot_target_ms, least_tpot_ms)
        return RequestContext(
            tenant=self.tenant,
            service_class=self.service_class,
            arrival_unix_ns=arrival_ns,
            ttft_deadline_unix_ns=arrival_ns + int(ttft_ms * 1e6),
            tpot_target_us=max(int(tpot_ms * 1000), 1),
            gateway_id=defaults.gateway_id,
            traceparent=self.traceparent,
        )


def read_headers(found: Mapping[bytes, bytes], caller: Caller = ANYBODY) -> Headers:
    """Parse headers, keyed by lowercase name as in ASGI.

    Raise InvalidRequest, which names the header. Raise PermissionDenied if the caller may not use the tenant or class.
    """
    traceparent = found.get(b"traceparent", b"").decode("latin-1")
    return Headers(
        request_id=_request_id(found),
        tenant=caller.tenant_of(named_in(found, TENANT_HEADER)),
        service_class=caller.class_of(named_in(found, CLASS_HEADER), DEFAULT_CLASS),
        ttft_deadline_ms=_milliseconds(found, "x-fulcrum-ttft-deadline-ms"),
        tpot_target_ms=_milliseconds(found, "x-fulcrum-tpot-target-ms"),
        # W3C: a receiver that cannot parse the header continues without it.
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        details=found.get(b"x-fulcrum-details") == b"1",
    )


def _request_id(found: Mapping[bytes, bytes]) -> str:
    if b"x-request-id" not in found:
        return ""
    value = found[b"x-request-id"].decode("latin-1")
    if not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest(f"header x-request-id must match {_REQUEST_ID.pattern}", param="x-request-id")
    return value


def _milliseconds(found: Mapping[bytes, bytes], name: str) -> float | None:
    value = found.get(name.encode())
    if value is None:
        return None
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds <= MAX_TARGET_MS:
        raise InvalidRequest(f"header {name} must be milliseconds, above 0 and up to {MAX_TARGET_MS}", param=name)
    return milliseconds


class Constraint(NamedTuple):
    """A schema or grammar rule for the answer, and the field that contained it."""

    field: str
    schema: Mapping[str, Any] | None = None
    rule: str = ""
    """The right-hand side of a grammar rule; empty if there is a schema."""


def constraint_of(request: Common) -> Constraint | None:
    """Return the guided decoding constraint, or None. Raise InvalidRequest if the request has several."""
    own = request.structured_outputs or StructuredOutputs()
    given = {
        "structured_outputs.json": own.json,
        "structured_outputs.regex": own.regex,
        "structured_outputs.choice": own.choice,
        "structured_outputs.json_object": own.json_object or None,
        "structured_outputs.grammar": own.grammar,
        "guided_json": request.guided_json,
        "guided_regex": request.guided_regex,
        "guided_choice": request.guided_choice,
        "guided_grammar": request.guided_grammar,
    }
    first, second, *_ = *(field for field, value in given.items() if value is not None), "", ""
    if second:
        raise InvalidRequest(f"{first} and {second} cannot be combined", param=second)
    return _constraint(first, given[first]) if first else None


def _constraint(field: str, value: Any) -> Constraint:
    if field.endswith("regex"):
        return Constraint(field, rule=pattern_rule(value))
    if field.endswith("choice"):
        return Constraint(field, rule=choice_rule(value))
    if field.endswith("grammar"):
        try:
            return Constraint(field, rule=grammar_rule(value))
        except InvalidGrammar as error:
            raise InvalidRequest(f"{field} cannot be parsed: {error}", param=field) from None
    return Constraint(field, {"type": "object"} if field.endswith("json_object") else _schema(value, field))


def _schema(given: str | dict[str, Any], field: str) -> Mapping[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} must be a JSON schema, or the text of one", param=field)
    return found


DEFAULT_COMPLETION_TOKENS = 16
"""The default of max_tokens for text completions, as in OpenAI's API. A chat may use the rest of the context."""

_ADVISED = tuple(field.name for field in fields(SamplingDefaults))

TextPair = tuple[str, str]
Prompt = str | list[int] | TextPair


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that has passed all checks that need no model."""

    model: str
    messages: tuple[ChatMessage, ...]
    """The messages of a chat; empty for other requests."""
    prompts: tuple[Prompt, ...]
    """The prompts of a text completion; empty for a chat."""
    n: int
    max_tokens: int | None
    max_tokens_field: str
    sampling: Sampling
    """The sampling parameters. The seed is missing, because each choice gets its own."""
    unset: frozenset[str]
    """The fields of `sampling` that the client left out. The model's recommended values replace them."""
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tools: ToolUse | None = None
    """The tools that the model may call; None if it may call none."""
    effort: str | None = None
    """The reasoning effort, in the client's words."""
    effort_is_hint: bool = False
    """True if the effort is ignored, and not refused, for a model whose chat template does not support it."""
    thinking: bool | None = None
    """True to reason and False not to, where no effort is named. None leaves it to the chat template."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    """The JSON schema that the answer must match."""
    schema_field: str = "response_format"
    """The name of the field for errors about the schema."""
    strict: bool = False
    """True if keywords that the grammar cannot enforce are an error. If False, the answer is checked for them."""
    rule: str = ""
    """A grammar rule that the answer must match, instead of a schema."""
    ordered: bool = False
    """True if the answer reports text, reasoning and calls in the order in which the model wrote them."""
    chat_field: str = ""
    """The name of the field for errors about the prompt; empty for `messages` or `prompt`."""
    echo: bool = False
    """True if the answer begins with the prompt."""
    prompt_logprobs: int | None = None
    """The number of alternatives to return for each prompt token. None requests no logprobs for the prompt."""
    shows_prompt_logprobs: bool = False
    """True if the answer lists the prompt's logprobs in a field of its own, as in vLLM."""
    shows_logprobs: bool = False
    token_ids: bool = False
    """True if the answer includes token ids."""
    best: int | None = None
    """The number of choices per prompt to return, most likely first; None returns all `n`."""
    only_prompt: bool = False
    """True if the client wants no tokens after the prompt. Workers still generate one, which is dropped."""
    hides_reasoning: bool = False
    """True if the answer's reasoning is not sent."""
    raw: bool = False
    """True if prompts are tokenised without adding special tokens."""
    opens_answer: bool = True
    """True if a chat's prompt ends with the template's opening of an answer. False if it ends with the last message."""
    continues: bool = False
    """True if the answer continues the last message's text."""
    images: tuple[SentImage, ...] = ()
    """The images of a chat, in order."""
    pooled: bool = False
    """True if the request wants a vector or score for each prompt instead of text."""
    pairs: tuple[TextPair, ...] = ()
    """The pairs of texts that a cross-encoder scores; empty if the request wants vectors."""

    @property
    def guided(self) -> bool:
        return self.schema is not None or bool(self.rule) or (self.tools is not None and self.tools.required)

    @property
    def prompt_field(self) -> str:
        return self.chat_field or ("messages" if self.messages else "prompt")

    @property
    def choices(self) -> int:
        return self.n * max(len(self.prompts), 1)


def parse_chat(body: bytes) -> ParsedRequest:
    return convert_chat(fit(body, ChatRequest, tidy_chat))


def parse_tokenize(body: bytes) -> tuple[ParsedRequest, bool]:
    """Parse a body of /tokenize. Also return whether the client wants the tokens' texts."""
    request = fit(body, TokenizeRequest, tidy_tokenize)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if request.messages is None:
        parsed = _convert(CompletionRequest(model=request.model, prompt=""), Sampling(), max_tokens=None)
        raw = request.add_special_tokens is False
        return replace(parsed, prompts=(request.prompt or "",), raw=raw), bool(request.return_token_strs)
    chat = ChatRequest(
        model=request.model,
        messages=request.messages,
        tools=request.tools,
        reasoning_effort=request.reasoning_effort,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    if request.add_special_tokens:
        text = "add_special_tokens is for prompts: a chat's template writes its special tokens"
        raise UnsupportedField(text, param="add_special_tokens")
    return convert_chat(chat), bool(request.return_token_strs)


def pooled_request(
    model: str, prompts: tuple[Prompt, ...], field: str, *, raw: bool = False, pairs: tuple[TextPair, ...] = ()
) -> ParsedRequest:
    """Return a request for a vector or score for each prompt. Errors about prompts name `field`."""
    if not prompts or not all(prompts):
        raise InvalidRequest(f"{field} is empty, or has an empty part", param=field)
    # A pooled sequence needs one step, like a sequence that generates one token.
    parsed = _convert(CompletionRequest(model=model, prompt=""), Sampling(), max_tokens=1)
    return replace(parsed, prompts=prompts, chat_field=field, raw=raw, pooled=True, pairs=pairs)


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    return fit(body, DetokenizeRequest, tidy_detokenize)


def convert_chat(request: ChatRequest) -> ParsedRequest:
    """Convert a chat whose types and ranges have been checked."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
    sampling = _sampling(request, logprobs=request.top_logprobs or 0 if request.logprobs else None)
    messages = tuple(chat_message(message, place) for place, message in enumerate(request.messages))
    parsed = _convert(
        request,
        sampling,
        messages=messages,
        max_tokens=newer if newer is not None else older,
        max_tokens_field="max_tokens" if newer is None else "max_completion_tokens",
    )
    if images := sent_images(request.messages):
        parsed = replace(parsed, images=images)
    continues, opens = bool(request.continue_final_message), request.add_generation_prompt
    if continues and opens:
        text = "continue_final_message and add_generation_prompt cannot be combined"
        raise InvalidRequest(text, param="continue_final_message")
    if continues or opens is False:
        parsed = replace(parsed, opens_answer=False, continues=continues)
    if request.include_reasoning is False:
        parsed = replace(parsed, hides_reasoning=True)
    tools, effort, variables = tool_use(request), request.reasoning_effort, request.chat_template_kwargs
    parsed = _with_constraint(parsed, request)
    if tools is None and effort is None and not parsed.guided and not variables:
        return parsed
    parsed = replace(parsed, tools=tools, effort=effort, template_variables=variables or {})
    if tools is not None and tools.required:
        _check_guided(request, "tool_choice")
    return parsed


def parse_completion(body: bytes) -> ParsedRequest:
    request = fit(body, CompletionRequest, tidy_completion)
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    scores = request.echo or request.prompt_logprobs is not None
    if not max_tokens and not scores:
        raise InvalidRequest("max_tokens: 0 needs echo or prompt_logprobs", param="max_tokens")
    sampling = _sampling(request, logprobs=request.logprobs)
    parsed = _convert(request, sampling, prompts=prompts_of(request.prompt), max_tokens=max_tokens or 1)
    if scores or request.best_of is not None:
        parsed = _with_prompt(parsed, request, only_prompt=not max_tokens)
    return _with_constraint(parsed, request)


def _with_prompt(parsed: ParsedRequest, request: CompletionRequest, *, only_prompt: bool) -> ParsedRequest:
    """Apply echo and best_of, which only text completions support."""
    n, best_of = request.n or 1, request.best_of
    if best_of is not None and best_of < n:
        raise InvalidRequest("best_of is less than n", param="best_of")
    if best_of is not None and best_of > n and request.stream:
        raise InvalidRequest("best_of greater than n cannot be streamed", param="best_of")
    parsed = replace(parsed, echo=bool(request.echo), only_prompt=only_prompt)
    if request.echo and request.logprobs is not None:
        parsed = _scored(parsed, max(request.logprobs, parsed.prompt_logprobs or 0))
    if best_of is not None and best_of > n:
        parsed.sampling.logprobs = True
        parsed = replace(parsed, n=best_of, best=n)
    return parsed


def _scored(parsed: ParsedRequest, most: int) -> ParsedRequest:
    """Request logprobs for the prompt tokens. Workers send them with the first output token."""
    parsed.sampling.logprobs = parsed.sampling.prompt_logprobs = True
    parsed.sampling.prompt_top_logprobs = most
    return replace(parsed, prompt_logprobs=most)


def _with_constraint(parsed: ParsedRequest, request: ChatRequest | CompletionRequest) -> ParsedRequest:
    """Add the answer's schema or rule.

    Raise InvalidRequest if the request has both a response format and a guided decoding field.
    """
    wanted, constraint = request.response_format, constraint_of(request)
    schema = _answer_schema(wanted)
    if schema is not None:
        if constraint is not None:
            raise InvalidRequest(f"response_format and {constraint.field} cannot be combined", param=constraint.field)
        own = wanted.json_schema if wanted else None
        constraint, parsed = Constraint("response_format", schema), replace(parsed, strict=bool(own and own.strict))
    if constraint is None:
        return parsed
    _check_guided(request, constraint.field)
    return replace(parsed, schema=constraint.schema, rule=constraint.rule, schema_field=constraint.field)


def _answer_schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise InvalidRequest("json_schema needs a schema", param="response_format.json_schema")
    return wanted.json_schema.schema


def _check_guided(request: Common, field: str) -> None:
    """Reject fields that would make a guided answer continue after it is complete."""
    if request.ignore_eos:
        raise InvalidRequest(f"ignore_eos and {field} cannot be combined", param="ignore_eos")
    if request.min_tokens:
        raise InvalidRequest(f"min_tokens and {field} cannot be combined", param="min_tokens")


def _convert(
    request: Common,
    sampling: Sampling,
    *,
    messages: tuple[ChatMessage, ...] = (),
    prompts: tuple[Prompt, ...] = (),
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
) -> ParsedRequest:
    stop, options = request.stop, request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if sum(map(len, stops)) > MAX_STOPS_CHARS:
        raise InvalidRequest(f"stop: the strings exceed {MAX_STOPS_CHARS} characters in total", param="stop")
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens exceeds {max_tokens_field}", param="min_tokens")
    parsed = ParsedRequest(
        model=request.model,
        messages=messages,
        prompts=prompts,
        n=request.n or 1,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        sampling=sampling,
        unset=frozenset(name for name in _ADVISED if getattr(request, name) is None),
        seed=request.seed,
        stops=stops,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        shows_logprobs=sampling.logprobs,
        token_ids=bool(request.return_token_ids),
    )
    if request.prompt_logprobs is None:
        return parsed
    if request.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return replace(_scored(parsed, request.prompt_logprobs), shows_prompt_logprobs=True)


def _sampling(request: Common, *, logprobs: int | None) -> Sampling:
    # `logprobs` is the number of alternatives to each token. None requests no logprobs.
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
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids or (),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if not all(map(_is_token_id, biases)):
        key = next(key for key in biases if not _is_token_id(key))
        raise InvalidRequest(f"logit_bias: {quoted(key)} is not a token id", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def prompts_of(prompt: str | list[str | int | list[int]], field: str = "prompt") -> tuple[Prompt, ...]:
    """Convert the prompt of a text completion or embedding request. `field` is the field's name in errors."""
    if isinstance(prompt, str):
        return (prompt,)
    tokens = [item for item in prompt if isinstance(item, int)]
    if not prompt or (tokens and len(tokens) < len(prompt)):
        raise InvalidRequest(f"{field} must be text, token ids, or a list of either", param=field)
    return (tokens,) if tokens else tuple(item for item in prompt if not isinstance(item, int))
