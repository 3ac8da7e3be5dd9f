"""The ASGI endpoint of the generating routes (chat, completions, responses and others).

The endpoint reads, checks, tokenises and queues a request, and then sends its answer.
"""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import FulcrumError
from libs.dispatch.dispatcher import Dispatcher
from libs.keys.gate import caller_of
from libs.model.tokenizer import Tokenizer
from libs.runtime.clock import Clock
from libs.runtime.http.semantics import check_json
from libs.runtime.tasks import TaskOwner
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.choice import Choice, first_error
from services.gateway.request.exchange import (
    ClientGone,
    Exchange,
    Frame,
    OutputSignal,
    Stalled,
    Stalls,
    Wire,
    error_reply,
    read_body,
)
from services.gateway.request.formats import Format
from services.gateway.request.intake import Arrival, Intake
from services.gateway.request.limits import FREE, TenantLimiter
from services.gateway.request.models import LoadableModels
from services.gateway.request.parse import Headers, ParsedRequest, read_headers
from services.gateway.request.prompt import ServedModel
from services.gateway.request.recorder import DemandArrival, DemandPublisher
from services.gateway.turns import IntakeRounds

WAIT_HEADER = "x-fulcrum-expected-wait-ms"
"""The response header with the expected loading time of a model that no worker served when the request arrived."""
# The status appears only in metrics, because the client has disconnected.
CLIENT_GONE_STATUS = 499


class Answering(Protocol):
    """An answer to one client. Its methods raise errors only while nothing has been sent."""

    async def stream(self, wire: Wire) -> None: ...

    async def whole(self, wire: Wire) -> None: ...

    async def reply(self) -> object:
        """Return the body that `whole` sends."""
        ...


class AnswerFactory(Protocol):
    """A function that creates the answer from a request's choices."""

    def __call__(
        self,
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        signal: OutputSignal,
        headers: Mapping[str, str],
    ) -> Answering: ...


class Reader(Protocol):
    """The part that differs between routes: parsing the body and formatting the answer."""

    async def read(self, body: bytes, arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        """Parse a body. Raise FulcrumError if it is invalid."""
        ...


class CompletionReader:
    def __init__(
        self, parse: Callable[[bytes], ParsedRequest], make_format: Callable[[Tokenizer, bool], Format]
    ) -> None:
        self._parse = parse
        self._make_format = make_format

    async def read(self, body: bytes, arrival: Arrival) -> tuple[ParsedRequest, AnswerFactory]:
        parsed = self._parse(body)
        return parsed, partial(self._answer, AnswerFields.of(parsed))

    def _answer(
        self,
        shown: "AnswerFields",
        choices: list[Choice],
        model: ServedModel,
        arrival: Arrival,
        *,
        signal: OutputSignal,
        headers: Mapping[str, str],
    ) -> Exchange:
        shape = self._make_format(model.tokenizer, shown.logprobs)
        return Exchange(choices, shape, shown.frame(arrival, shape, headers), signal)


class CompletionEndpoint:
    def __init__(
        self,
        route: str,
        *,
        reader: Reader,
        intake: Intake,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        clock: Clock,
        tasks: TaskOwner,
        stalls: Stalls,
        demand: DemandPublisher,
        max_body_bytes: int,
        models: LoadableModels | None = None,
        limits: TenantLimiter | None = None,
        rounds: IntakeRounds | None = None,
    ) -> None:
        """Create the endpoint. With `limits` of None, no tenant is limited.

        All routes of a gateway share `rounds`; with None, this route has a queue of its own.
        """
        self._route = route
        self._reader = reader
        self._intake = intake
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._tasks = tasks
        self._stalls = stalls
        self._demand = demand
        self._max_body_bytes = max_body_bytes
        self._models = models
        self._limits = limits
        self._rounds = rounds or IntakeRounds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors before the first byte of the answer are sent in OpenAI's format."""
        arrival_ns = self._clock.now_ns()
        request_id = uuid.uuid4().hex
        status = 500
        demand: DemandArrival | None = None
        allowance = FREE
        try:
            raw = dict(scope["headers"])
            caller = caller_of(scope)
            headers = read_headers(raw, caller)
            request_id = headers.request_id or request_id
            check_json(raw)
            demand = self._demand.arrive(headers.tenant, headers.service_class)
            await self._rounds.turn(headers.tenant)
            self._stalls.check_room(headers.tenant)
            if self._limits is not None:
                allowance = await self._limits.admit(headers.tenant)
            with self._stalls.watched(headers.tenant) as read_deadline:
                hold = partial(self._stalls.hold, read_deadline)
                arrival = Arrival(request_id, arrival_ns, headers, caller.models, allowance, hold)
                wire = Wire(send, read_deadline)
                # The body and the request may be large, and an answer may take long, so both are freed before it.
                body = demand.read(await read_body(receive, raw, self._max_body_bytes, read_deadline, self._stalls))
                parsed, answer = await self._reader.read(body, arrival)
                serving = self._serve(parsed, answer, arrival, body=body, receive=receive, wire=wire, demand=demand)
                del body
                del parsed
                await serving
            status = 200
        except (ClientGone, Stalled):
            status = CLIENT_GONE_STATUS
        except FulcrumError as error:
            status = error.http_status
            if demand is not None:
                demand.failed(error)
            with suppress(Stalled), self._stalls.watched() as read_deadline:
                own = {"x-request-id": request_id, **error.http_headers}
                await Wire(send, read_deadline).json(status, error_reply(error), own)
        finally:
            allowance.end()
            self._metrics.responses.labels(self._route, str(status)).inc()

    async def _serve(
        self,
        parsed: ParsedRequest,
        answer: AnswerFactory,
        arrival: Arrival,
        *,
        body: bytes,
        receive: Receive,
        wire: Wire,
        demand: DemandArrival,
    ) -> None:
        model = self._intake.model(parsed, arrival.models)
        key = request_key(arrival.headers.tenant, body) if self._dispatcher.wants_keys else b""
        del body
        demand.model, demand.choices = model.routed, parsed.choices
        await arrival.allowance.choices(parsed.choices)  # before any waiting
        with (
            nullcontext(0.0)
            if self._models is None
            else self._models.requested(model.routed, model.adapter_name) as wait_s
        ):
            await self._check_room(parsed.choices, key, arrival.headers)  # before the work of making choices
            signal = OutputSignal()
            choices: list[Choice] = []
            watch = self._tasks.spawn("client watch", signal.watch(receive))
            try:
                if parsed.images:
                    parsed = await _while_watched(self._intake.fetched(parsed, model, arrival), watch)
                choices = await self._intake.choices(parsed, model, arrival, signal.changed)
                await arrival.allowance.prompt(sum(choice.generation.prompt_tokens for choice in choices[:: parsed.n]))
                exchange = answer(choices, model, arrival, signal=signal, headers=_headers(arrival, wait_s))
                streamed = parsed.stream
                del parsed  # the last reference, because an answer may take long
                generations = [choice.generation for choice in choices]
                self._dispatcher.submit(generations, key)
                demand.admitted(generations)
                await (exchange.stream(wire) if streamed else exchange.whole(wire))
            finally:
                watch.cancel()
                # A choice that has not ended by now is no longer needed.
                error = first_error(choices)
                if error is not None:
                    self._metrics.failed_answers.labels(self._route, error.code).inc()
                arrival.allowance.output(sum(len(choice.generation.output) for choice in choices))
                for choice in choices:
                    self._dispatcher.cancel(choice.generation, error)

    async def _check_room(self, choices: int, key: bytes, headers: Headers) -> None:
        """Wait for the request's turn to have its choices created.

        Raise the dispatcher's error if its queue has no room.
        """
        tenant = None if headers.service_class == BATCH_CLASS else headers.tenant
        self._dispatcher.check_room(choices, key, tenant)
        if choices > 1:
            await self._rounds.turn(headers.tenant, choices)
            self._dispatcher.check_room(choices, key, tenant)


async def _while_watched(work: Coroutine[Any, Any, ParsedRequest], watch: asyncio.Task[None]) -> ParsedRequest:
    """Await `work`. Cancel it and raise ClientGone if `watch` ends first because the client disconnected."""
    task = asyncio.create_task(work, name="before a request is queued")
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request_key(tenant: str, body: bytes) -> bytes:
    """Return a digest that is equal for one tenant's requests with the same body."""
    return blake2b(tenant.encode() + b"\0" + body, digest_size=16).digest()


def _headers(arrival: Arrival, wait_s: float) -> dict[str, str]:
    expected = {WAIT_HEADER: str(round(wait_s * 1000))} if wait_s else {}
    return {"x-request-id": arrival.request_id, **expected, **arrival.allowance.headers()}


class AnswerFields(NamedTuple):
    # Only the fields that the answer needs, because the request may be large and the answer may take long.

    model: str
    n: int
    best: int | None
    scores: bool
    logprobs: bool
    include_usage: bool
    continuous_usage: bool

    @classmethod
    def of(cls, parsed: ParsedRequest) -> "AnswerFields":
        shown = (parsed.shows_logprobs, parsed.include_usage, parsed.continuous_usage)
        return cls(parsed.model, parsed.n, parsed.best, parsed.shows_prompt_logprobs, *shown)

    def frame(self, arrival: Arrival, shape: Format, headers: Mapping[str, str]) -> Frame:
        """Return the fields that all parts of the answer have in common."""
        return Frame(
            id=shape.id_prefix + arrival.request_id,
            created=arrival.arrival_ns // 1_000_000_000,
            model=self.model,
            n=self.n,
            best=self.best,
            scores=self.scores,
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            details=arrival.headers.details,
            headers=headers,
        )
