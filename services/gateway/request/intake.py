"""The conversion of a parsed request into choices that can be queued: tokenisation, schemas and images."""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import InvalidRequest, UnsupportedField
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.ports import Tenancy
from libs.engine.port import PromptImage
from libs.model.info import PairTokens, SamplingDefaults
from libs.model.tokenizer import Decoder
from services.gateway.answers.families import MISTRAL_ID_CHARS, AnswerFormat, prompt_end
from services.gateway.answers.guide import SchemaCheck, SchemaVerdict, ToolSchema, guide_of
from services.gateway.answers.parts import AnswerReader
from services.gateway.fleet import WorkerLinks
from services.gateway.images.fetch import ImageFetcher
from services.gateway.images.files import (
    ImageLimits,
    check_count,
    check_vision,
    check_workers,
    max_file_bytes,
    place_images,
    read_images,
)
from services.gateway.request.choice import Choice, ChoiceText, PartReaders, PromptShown
from services.gateway.request.limits import FREE, Allowance
from services.gateway.request.parse import Defaults, Headers, ParsedRequest
from services.gateway.request.prompt import Catalog, PrefixHints, ServedModel, check_fit, gives_tools_as_text, tokenise
from services.gateway.request.schema import MAX_CALLS
from services.gateway.request.unchecked import AnswerRecord, Omitted
from services.gateway.turns import FairSlots

MAX_SCHEMA_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class RequestSchemas:
    """The schemas of one request, converted for llguidance."""

    answer: Mapping[str, Any] | None = None
    tools: list[ToolSchema] = field(default_factory=list)
    omitted: list[Omitted] = field(default_factory=list)
    """The keywords that the grammars do not enforce."""


async def check_schemas(parsed: ParsedRequest, check: SchemaCheck, tenant: str = "") -> RequestSchemas:
    """Convert a request's schemas.

    Raise InvalidRequest, which names the field, if a schema cannot be enforced. `tenant` determines whose share of the
    checker's slots is used.
    """
    if parsed.rule:
        await _check(parsed.rule, parsed.schema_field, check, tenant)
    found = RequestSchemas()
    if parsed.schema is not None:
        verdict = await _check(parsed.schema, parsed.schema_field, check, tenant, strict=parsed.strict)
        found = replace(found, answer=json.loads(verdict.schema))
        if verdict.omitted:
            found.omitted.append(Omitted(parsed.schema_field, parsed.schema, verdict.omitted))
    for name, schema, named in parsed.tools.callable() if parsed.tools else ():
        strict = parsed.tools is not None and name in parsed.tools.strict
        verdict = await _check(schema, named, check, tenant, strict=strict, arguments=True)
        found.tools.append((name, json.loads(verdict.schema)))
        if verdict.omitted:
            found.omitted.append(Omitted(named, schema, verdict.omitted, name))
    return found


async def _check(
    schema: Mapping[str, Any] | str,
    named: str,
    check: SchemaCheck,
    tenant: str,
    *,
    strict: bool = False,
    arguments: bool = False,
) -> SchemaVerdict:
    """Return the verdict on a schema or a rule. With `strict`, reject a schema with keywords that cannot be enforced.

    With `arguments`, the schema describes a tool's arguments, and its objects are closed to additional properties.
    """
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"{named} is over {MAX_SCHEMA_CHARS} characters", param=named)
    # Clients such as LiteLLM drop `additionalProperties: false`. Small models then add properties without end.
    verdict = await check.verdict(text, tenant, close=arguments and isinstance(schema, Mapping))
    fault = verdict.fault or (f"{verdict.reason}; without strict it is checked afterwards" if strict else "")
    if verdict.fault or (strict and verdict.omitted):
        raise InvalidRequest(
            f"{named}: {'it' if isinstance(schema, str) else 'the schema'} cannot be enforced: {fault}", param=named
        )
    return verdict


def answer_guide(parsed: ParsedRequest, schemas: RequestSchemas, model: ServedModel, prompt: list[int]) -> str:
    """Return the grammar of an answer to this prompt. Pure."""
    # Only a chat's answer has the model's answer format. A text completion continues the client's text.
    shape, tokenizer, tools = model.format if parsed.messages else AnswerFormat(), model.tokenizer, parsed.tools
    called = tools is not None and tools.required
    return guide_of(
        shape,
        {text: token_id for token_id, text in tokenizer.added_tokens.items()},
        schema=None if called else schemas.answer,
        rule="" if called else parsed.rule,
        tools=schemas.tools,
        parallel=bool(tools and tools.parallel),
        thinks=shape.thinks(prompt_end(tokenizer, prompt)),
    )


_SEEDS = 2**64
_POOLINGS = {
    "last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN, "cls": pb.POOLING_CLS, "score": pb.POOLING_SCORE,
}  # fmt: skip
_NO_TOOLS: Mapping[str, Mapping[str, Any]] = {}
TOKENISE_THREADS = 2
# The bound on prompts that wait for one of the tokeniser's threads.
MAX_ARRIVING = 256


@dataclass(frozen=True, slots=True)
class RequestLimits:
    max_n: int
    max_choices: int
    max_inputs: int
    """The maximum number of texts in one embedding or scoring request."""
    images: ImageLimits = field(default_factory=ImageLimits)


def _unbounded(_size_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request's id, headers and time of arrival. The body is not included, because it may be large."""

    request_id: str
    arrival_ns: int
    headers: Headers
    models: AbstractSet[str] = frozenset()
    """The models that the caller may use. An empty set allows all."""
    allowance: Allowance = FREE
    hold: Callable[[int], None] = _unbounded
    """A function that counts further bytes stored for the request, such as fetched images.

    It raises QueueFull if open requests already occupy too much memory.
    """


class Intake:
    def __init__(
        self,
        *,
        catalog: Catalog,
        fleet: WorkerLinks,
        hints: PrefixHints,
        threads: Executor,
        defaults: Defaults,
        limits: RequestLimits,
        cache_salt: Callable[[str], str] = str,
        tenants: Tenancy | None = None,
        fetcher: ImageFetcher | None = None,
    ) -> None:
        """Create the intake. `cache_salt` returns a tenant's salt, which keeps its KV blocks apart from those of other
        tenants.

        Tenants' turns at the tokeniser's threads come from `tenants`; with None, all requests are treated alike.
        Without a `fetcher`, only data URLs can supply images.
        """
        self._catalog = catalog
        self._fleet = fleet
        self._hints = hints
        self._threads = threads
        self._defaults = defaults
        self._limits = limits
        self._cache_salt = cache_salt
        self._fetcher = fetcher
        full = f"{MAX_ARRIVING} requests may wait to be tokenised, and too many are waiting: try again"
        # Threads are not divided between tenants: each prompt needs them only briefly, so turns suffice.
        self.tokenising = FairSlots(TOKENISE_THREADS, MAX_ARRIVING, full, tenants=tenants, shared=False)
        self.schemas = SchemaCheck(tenants)

    def model(self, parsed: ParsedRequest, allowed: AbstractSet[str]) -> ServedModel:
        """Return the requested model. An empty set of `allowed` models allows all.

        Raise UnknownModel, or InvalidRequest if the request has too many choices.
        """
        if parsed.n > self._limits.max_n:
            raise InvalidRequest(f"n is over {self._limits.max_n}", param="n")
        most = self._limits.max_inputs if parsed.pooled else self._limits.max_choices
        if parsed.choices > most:
            text = f"{parsed.choices} {'inputs' if parsed.pooled else 'choices'} are asked for; {most} are allowed"
            raise InvalidRequest(text, param=parsed.prompt_field)
        return self._catalog.need(parsed.model, allowed)

    async def fetched(self, parsed: ParsedRequest, model: ServedModel, arrival: Arrival) -> ParsedRequest:
        """Return the request with its image URLs replaced by the files behind them.

        Raise InvalidRequest or QueueFull.
        """
        if self._fetcher is None or not parsed.images:
            return parsed
        self._check_images(parsed, model)
        images = await self._fetcher.fetch(parsed.images, arrival.headers.tenant, arrival.hold)
        return replace(parsed, images=images)

    def max_image_bytes(self, parsed: ParsedRequest) -> int:
        """Return an upper bound of the size of the request's images."""
        return max_file_bytes(parsed.images, self._limits.images)

    async def choices(
        self, parsed: ParsedRequest, model: ServedModel, arrival: Arrival, changed: Callable[[], None]
    ) -> list[Choice]:
        """Return `n` choices for each prompt, in order. Raise InvalidRequest if a prompt does not fit the model."""
        parsed, pooling = as_served(parsed, model)
        context_tokens = self._fleet.max_context_tokens(model.routed, model.info.request_tokens)
        tenant = arrival.headers.tenant
        if parsed.images:
            self._check_images(parsed, model)
        prompts = await self.tokens(parsed, model, tenant, most_tokens=context_tokens)
        max_output_tokens = check_fit(parsed, prompts, model, context_tokens)
        seed = parsed.seed if parsed.seed is not None else secrets.randbits(63)
        end_token_ids = _ends(parsed, model)
        schemas = await check_schemas(parsed, self.schemas, tenant) if parsed.guided else None
        context = arrival.headers.context(arrival.arrival_ns, self._wanted(model))
        context.cache_salt = self._cache_salt(context.tenant)
        images = await self._images(parsed, model, prompts[0], tenant) if parsed.images else ()
        hints = await self._cached(parsed, model, prompts, context.cache_salt, images=images)
        choices: list[Choice] = []
        as_text = bool(parsed.messages) and gives_tools_as_text(parsed, model)
        # Text and token prompts are the client's, and so is the format of their continuation.
        make_parts = partial(_parts, parsed, model) if parsed.messages else None
        for prompt, cached_hints in zip(prompts, hints, strict=True):
            packed = pack_u32(prompt)
            guide = answer_guide(parsed, schemas, model, prompt) if schemas else ""
            for which in range(parsed.n):
                request_id = _id_of(arrival.request_id, len(choices), parsed.choices)
                decoder = model.tokenizer.decoder()
                text = ChoiceText(
                    request_id=request_id,
                    decoder=decoder,
                    stops=parsed.stops,
                    silent_token_ids=end_token_ids,
                    min_tokens=parsed.sampling.min_tokens,
                    in_pieces=parsed.stream,
                    parts=make_parts(prompt, decoder) if make_parts else None,
                    ordered=parsed.ordered,
                    prompt=_prompt_shown(parsed, model, prompt),
                    record=self._record(len(choices), schemas, tenant),
                    changed=changed,
                )
                generation = Generation(
                    request_id=request_id,
                    model=model.routed,
                    adapter=model.adapter,
                    adapter_source=model.adapter_source,
                    prompt=packed,
                    prompt_tokens=len(prompt),
                    max_output_tokens=max_output_tokens,
                    sampling=_sampling(parsed, model.info.sampling, seed + which, guide),
                    context=context,
                    end_token_ids=end_token_ids,
                    sink=text,
                    timeline=RequestTimes(arrival.arrival_ns),
                    cached_hints=cached_hints,
                    batch=context.service_class == BATCH_CLASS,
                    pooling=pooling,
                    second_from=prompt.second_from if isinstance(prompt, PairTokens) else 0,
                    images=images,
                )
                choices.append(Choice(len(choices), generation, text, as_text))
        return choices

    def _check_images(self, parsed: ParsedRequest, model: ServedModel) -> None:
        """Raise InvalidRequest if there are too many images.

        Raise UnsupportedField if the model, or the engine of one of its workers, accepts none.
        """
        check_vision(parsed.images, model.info.name, model.info.vision)
        check_count(parsed.images, self._limits.images)
        workers = [link.worker for link in self._fleet.links if link.worker and link.model == model.routed]
        check_workers(parsed.images, workers)

    async def _images(
        self, parsed: ParsedRequest, model: ServedModel, prompt: list[int], tenant: str
    ) -> tuple[PromptImage, ...]:
        """Return the images with their positions in the prompt. A tokeniser thread decodes them."""
        vision = model.info.vision
        assert vision is not None, "checked before"
        async with self.tokenising.slot(tenant, sum(len(image.url) + len(image.file) for image in parsed.images)):
            loop = asyncio.get_running_loop()
            files = await loop.run_in_executor(self._threads, read_images, parsed.images, self._limits.images)
        return place_images(prompt, files, vision)

    def _record(self, index: int, schemas: RequestSchemas | None, tenant: str) -> AnswerRecord | None:
        if schemas is None or not schemas.omitted:
            return None
        return AnswerRecord(index, schemas.omitted, partial(self.schemas.satisfied, tenant=tenant))

    def _wanted(self, model: ServedModel) -> Defaults:
        # Headers come first, then the model's targets, then the gateway's.
        if model.ttft_ms is None and model.tpot_ms is None:
            return self._defaults
        own = self._defaults
        ttft_ms, tpot_ms = model.ttft_ms or own.ttft_deadline_ms, model.tpot_ms or own.tpot_target_ms
        return replace(own, ttft_deadline_ms=ttft_ms, tpot_target_ms=tpot_ms)

    async def _cached(
        self,
        parsed: ParsedRequest,
        model: ServedModel,
        prompts: list[list[int]],
        salt: str,
        *,
        images: tuple[PromptImage, ...] = (),
    ) -> list[dict[str, int]]:
        """Return the number of cached tokens of each prompt by worker id.

        The result is empty for requests that need every prompt token computed.
        """
        pools_all = parsed.pooled and model.info.embedding.pooling != "last"
        if parsed.prompt_logprobs is not None or pools_all:
            return [{} for _ in prompts]
        spans = [image.span for image in images]
        look_up = partial(self._hints.cached_tokens, model.routed, salt=salt, adapter=model.adapter, images=spans)
        if len(prompts) == 1:
            return [await look_up(prompts[0])]
        return await asyncio.gather(*map(look_up, prompts))

    async def tokens(
        self, parsed: ParsedRequest, model: ServedModel, tenant: str, *, most_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raise InvalidRequest, or QueueFull if too many prompts wait for a thread. `most_tokens` is passed to `tokenise`.
        """
        if parsed.images:
            check_vision(parsed.images, model.info.name, model.info.vision)
            check_count(parsed.images, self._limits.images)
        slot = partial(self.tokenising.slot, tenant)
        return await tokenise(parsed, model, self._threads, most_tokens=most_tokens, slot=slot)


def as_served(parsed: ParsedRequest, model: ServedModel) -> tuple[ParsedRequest, pb.Pooling]:
    """Return the request with its prompts in the form that the model needs, and the pooling to apply.

    Raise UnsupportedField if the model does not support this kind of request.
    """
    name, own = model.info.name, model.info.embedding
    scores = own.pooling == "score"
    if not parsed.pooled:
        if model.info.encodes:
            routes = "/v1/score or /v1/rerank" if scores else "/v1/embeddings"
            raise UnsupportedField(f"model {name!r} is an encoder, which writes no text: use {routes}", param="model")
        return parsed, pb.POOLING_UNSPECIFIED
    if own.unserved:
        kind = "scores" if scores else "embeddings"
        raise UnsupportedField(f"{kind} are not served for model {name!r}: {own.unserved}", param="model")
    if scores and not parsed.pairs:
        text = f"model {name!r} is a cross-encoder, which gives no vectors: use /v1/score or /v1/rerank"
        raise UnsupportedField(text, param="model")
    if scores:
        parsed = replace(parsed, prompts=parsed.pairs)
    elif own.prompt:
        texts = tuple(own.prompt + each if isinstance(each, str) else each for each in parsed.prompts)
        parsed = replace(parsed, prompts=texts)
    return parsed, _POOLINGS[own.pooling]


def _parts(parsed: ParsedRequest, model: ServedModel, prompt: list[int], decoder: Decoder) -> PartReaders | None:
    """Return the parsers for a chat's answer, or None if the whole answer is content."""
    shape, tools = model.format, parsed.tools
    end = prompt_end(model.tokenizer, prompt) if shape.thinking is not None else ""
    parser = shape.parser(tools.schemas if tools else _NO_TOOLS, end)
    if parser is None:
        return None
    return PartReaders(
        reader=AnswerReader(parser, decoder, model.tokenizer.special_tokens),
        reasons=shape.reasons,
        new_call_id=_call_ids(shape.calls, parsed),
        max_calls=MAX_CALLS if tools is None or tools.parallel else 1,
        only_calls=tools is not None and tools.required,
        hides_reasoning=parsed.hides_reasoning,
    )


def _call_ids(calls: str, parsed: ParsedRequest) -> Callable[[str, int], str]:
    # Chat templates repeat the ids of calls in the next turn, and some models expect ids of a certain form.
    if calls == "mistral":
        return lambda _name, _place: secrets.token_hex()[:MISTRAL_ID_CHARS]
    if calls == "kimi-k2":
        before = sum(len(message.get("tool_calls") or ()) for message in parsed.messages)
        return lambda name, place: f"functions.{name}:{before + place}"
    return lambda _name, _place: f"call_{secrets.token_hex(12)}"


def _prompt_shown(parsed: ParsedRequest, model: ServedModel, prompt: list[int]) -> PromptShown | None:
    """Return the parts of the prompt that the answer includes, or None if there are none."""
    scored = parsed.prompt_logprobs is not None
    if not (parsed.echo or scored or parsed.token_ids or parsed.best):
        return None
    return PromptShown(
        prompt,
        model.tokenizer,
        echo=parsed.echo,
        scored=scored and parsed.shows_logprobs,
        only=parsed.only_prompt,
        ids=parsed.token_ids,
    )


def _ends(parsed: ParsedRequest, model: ServedModel) -> frozenset[int]:
    stops = parsed.sampling.stop_token_ids
    if parsed.sampling.ignore_eos:
        return frozenset(stops)
    return model.info.eos_token_ids.union(stops) if stops else model.info.eos_token_ids


def _sampling(parsed: ParsedRequest, advised: SamplingDefaults, seed: int, guide: str) -> pb.Sampling:
    own = pb.Sampling(guide=guide)
    own.MergeFrom(parsed.sampling)
    for name in parsed.unset:
        setattr(own, name, getattr(advised, name))
    own.seed = seed % _SEEDS
    return own


def _id_of(request_id: str, index: int, choices: int) -> str:
    return request_id if choices == 1 else f"{request_id}-{index}"
