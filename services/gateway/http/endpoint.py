"""The two hot routes as plain ASGI callables: read, check, tokenise, queue, answer."""

import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress

from starlette.types import Receive, Scope, Send

from libs.contracts.errors import FulcrumError
from libs.dispatch.dispatcher import Dispatcher
from libs.model.tokenizer import Tokenizer
from libs.runtime.clock import Clock
from libs.runtime.media import check_json
from libs.runtime.tasks import TaskOwner
from services.gateway.dispatch.choice import first_error
from services.gateway.dispatch.demand import DemandTeller, Visit
from services.gateway.dispatch.intake import Arrival, Intake
from services.gateway.http import sse
from services.gateway.http.body import ClientGone, read_body
from services.gateway.http.exchange import Exchange, Frame, News
from services.gateway.http.formats import Format
from services.gateway.http.stalls import Patience, Stalled, Stalls
from services.gateway.metrics import GatewayMetrics
from services.gateway.models.desk import ModelDesk
from services.gateway.prompt.headers import read_headers
from services.gateway.prompt.parse import Asked

WAIT_HEADER = "x-fulcrum-expected-wait-ms"
"""Of an answer whose model had to be loaded: what that was expected to take when the request came."""
CLIENT_GONE_STATUS = 499
"""For metrics only: nobody is there to get it."""


class CompletionEndpoint:
    """One of the two routes; they differ in what they parse and how they show it."""

    def __init__(
        self,
        route: str,
        *,
        parse: Callable[[bytes], Asked],
        make_format: Callable[[Tokenizer, bool], Format],
        intake: Intake,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        clock: Clock,
        tasks: TaskOwner,
        stalls: Stalls,
        demand: DemandTeller,
        max_body_bytes: int,
        models: ModelDesk | None = None,
    ) -> None:
        self._route = route
        self._parse = parse
        self._make_format = make_format
        self._intake = intake
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._tasks = tasks
        self._stalls = stalls
        self._demand = demand
        self._max_body_bytes = max_body_bytes
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, with OpenAI's error shape where it fails before its answer began."""
        arrival_ns = self._clock.now_ns()
        request_id = uuid.uuid4().hex
        status = 500
        visit: Visit | None = None
        try:
            raw = dict(scope["headers"])
            headers = read_headers(raw)
            request_id = headers.request_id or request_id
            check_json(raw)
            visit = self._demand.visit(headers.tenant, headers.service_class)
            self._stalls.check_room()
            with self._stalls.watched() as patience:
                arrival, wire = Arrival(request_id, arrival_ns, headers), sse.Wire(send, patience)
                # No name for body and request here: they may be large, and an answer may take long.
                await self._serve(
                    self._parse(visit.read(await self._read(receive, raw, patience))), arrival, receive, wire, visit
                )
            status = 200
        except (ClientGone, Stalled):
            status = CLIENT_GONE_STATUS
        except FulcrumError as error:
            status = error.http_status
            if visit is not None:
                visit.failed(error)
            with suppress(Stalled), self._stalls.watched() as patience:
                own = {"x-request-id": request_id, **error.http_headers}
                await sse.Wire(send, patience).json(status, sse.error_reply(error), own)
        finally:
            self._metrics.responses.labels(self._route, str(status)).inc()

    async def _read(self, receive: Receive, headers: Mapping[bytes, bytes], patience: Patience) -> bytes:
        return await read_body(receive, headers, self._max_body_bytes, patience, self._stalls)

    async def _serve(self, asked: Asked, arrival: Arrival, receive: Receive, wire: sse.Wire, visit: Visit) -> None:
        model = self._intake.model(asked)
        visit.model, visit.choices = asked.model, asked.choices
        with nullcontext(0.0) if self._models is None else self._models.asked(asked.model) as wait_s:
            self._dispatcher.check_room(asked.choices)  # before the work of tokenising
            news = News()
            choices = await self._intake.choices(asked, model, arrival, news.changed)
            shape = self._make_format(model.tokenizer, asked.sampling.logprobs)
            exchange = Exchange(choices, shape, _frame(asked, arrival, shape, wait_s), news)
            streamed = asked.stream
            del asked  # the last reference: an answer may take long
            watch = self._tasks.spawn("client watch", news.watch(receive))
            try:
                generations = [choice.generation for choice in choices]
                self._dispatcher.submit(generations)
                visit.admitted(generations)
                await (exchange.stream(wire) if streamed else exchange.whole(wire))
            finally:
                watch.cancel()
                # Whatever has not ended by now is wanted by nobody.
                error = first_error(choices)
                if error is not None:
                    self._metrics.failed_answers.labels(self._route, error.code).inc()
                for choice in choices:
                    self._dispatcher.cancel(choice.generation, error)


def _frame(asked: Asked, arrival: Arrival, shape: Format, wait_s: float) -> Frame:
    expected = {WAIT_HEADER: str(round(wait_s * 1000))} if wait_s else {}
    return Frame(
        id=shape.id_prefix + arrival.request_id,
        created=arrival.arrival_ns // 1_000_000_000,
        model=asked.model,
        n=asked.n,
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage,
        details=arrival.headers.details,
        headers={"x-request-id": arrival.request_id, **expected},
    )
