"""From a checked request to choices that are ready to wait for workers."""

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.model.sampling import SamplingDefaults
from services.gateway.dispatch.choice import Choice, ChoiceText
from services.gateway.dispatch.prefix_hints import PrefixHints
from services.gateway.prompt.catalog import Catalog, ServedModel
from services.gateway.prompt.headers import Defaults, Headers
from services.gateway.prompt.parse import Asked
from services.gateway.prompt.tokenise import check_fit, tokenise
from services.gateway.workers.fleet import Fleet

_SEEDS = 2**64
MAX_ARRIVING = 256
"""Requests whose prompts are being tokenised; the threads that do it are few."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request."""

    max_n: int
    max_choices: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came with a request beside its body."""

    request_id: str
    arrival_ns: int
    headers: Headers


class Intake:
    """Makes generations."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        fleet: Fleet,
        hints: PrefixHints,
        threads: Executor,
        defaults: Defaults,
        limits: Limits,
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._hints = hints
        self._threads = threads
        self._defaults = defaults
        self._limits = limits
        self._arriving = 0

    def model(self, asked: Asked) -> ServedModel:
        """Raises UnknownModel, and InvalidRequest for too many choices."""
        if asked.n > self._limits.max_n:
            raise InvalidRequest(f"n is over {self._limits.max_n}", param="n")
        if asked.choices > self._limits.max_choices:
            text = f"{asked.choices} choices are asked for; {self._limits.max_choices} are allowed"
            raise InvalidRequest(text, param=asked.prompt_field)
        return self._catalog.get(asked.model)

    async def choices(
        self, asked: Asked, model: ServedModel, arrival: Arrival, changed: Callable[[], None]
    ) -> list[Choice]:
        """One for each prompt and each of its `n`; raises InvalidRequest when a prompt does not fit the model."""
        prompts = await self._tokenise(asked, model)
        context_tokens = self._fleet.max_context_tokens(asked.model, model.info.max_context_tokens)
        max_output_tokens = check_fit(asked, prompts, model, context_tokens)
        seed = asked.seed if asked.seed is not None else secrets.randbits(63)
        end_token_ids = frozenset() if asked.sampling.ignore_eos else model.info.eos_token_ids
        context = arrival.headers.context(arrival.arrival_ns, self._wanted(model))
        hints = await self._cached(asked.model, prompts, context.tenant)
        choices: list[Choice] = []
        for prompt, cached_hints in zip(prompts, hints, strict=True):
            packed = pack_u32(prompt)
            for which in range(asked.n):
                request_id = _id_of(arrival.request_id, len(choices), asked.choices)
                text = ChoiceText(
                    request_id=request_id,
                    decoder=model.tokenizer.decoder(),
                    stops=asked.stops,
                    silent_token_ids=end_token_ids,
                    in_pieces=asked.stream,
                    # A prompt that is text or tokens is its client's own, and so is the format of what follows it.
                    channels=model.tokenizer.channels() if asked.messages else None,
                    changed=changed,
                )
                generation = Generation(
                    request_id=request_id,
                    model=asked.model,
                    prompt=packed,
                    prompt_tokens=len(prompt),
                    max_output_tokens=max_output_tokens,
                    sampling=_sampling(asked, model.info.sampling, seed + which),
                    context=context,
                    end_token_ids=end_token_ids,
                    sink=text,
                    timeline=RequestTimes(arrival.arrival_ns),
                    cached_hints=cached_hints,
                    batch=context.service_class == BATCH_CLASS,
                )
                choices.append(Choice(len(choices), generation, text))
        return choices

    def _wanted(self, model: ServedModel) -> Defaults:
        """Where headers say nothing, the model's own targets before the gateway's."""
        if model.ttft_ms is None and model.tpot_ms is None:
            return self._defaults
        own = self._defaults
        return Defaults(own.gateway_id, model.ttft_ms or own.ttft_deadline_ms, model.tpot_ms or own.tpot_target_ms)

    async def _cached(self, model: str, prompts: list[list[int]], tenant: str) -> list[dict[str, int]]:
        """Tokens that workers hold of each prompt."""
        if len(prompts) == 1:
            return [await self._hints.cached_tokens(model, prompts[0], tenant)]
        return await asyncio.gather(*(self._hints.cached_tokens(model, prompt, tenant) for prompt in prompts))

    async def _tokenise(self, asked: Asked, model: ServedModel) -> list[list[int]]:
        if self._arriving >= MAX_ARRIVING:
            raise QueueFull(f"{MAX_ARRIVING} requests are being tokenised already", retry_after_s=RETRY_AFTER_S)
        self._arriving += 1
        try:
            return await tokenise(asked, model, self._threads)
        finally:
            self._arriving -= 1


def _sampling(asked: Asked, advised: SamplingDefaults, seed: int) -> pb.Sampling:
    own = pb.Sampling()
    own.CopyFrom(asked.sampling)
    for name in asked.unset:
        setattr(own, name, getattr(advised, name))
    own.seed = seed % _SEEDS
    return own


def _id_of(request_id: str, index: int, choices: int) -> str:
    return request_id if choices == 1 else f"{request_id}-{index}"
