"""The execution of one batch line: through the same intake, queue and workers as any request, in the batch class."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import chain
from typing import Final

from libs.contracts.classes import BATCH_CLASS
from libs.contracts.errors import FulcrumError, NoWorkers, QueueFull, SequenceFailed, UnsupportedField, quoted
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Share
from libs.dispatch.dispatcher import Dispatcher
from libs.keys.table import DEFAULT_TENANT
from libs.policy.batch import GatewayLoad, allowed
from libs.policy.gateway.view import WorkerView, serves
from libs.runtime.backoff import Backoff
from libs.runtime.clock import Clock
from services.gateway.batch.job import NoWorkersForLong
from services.gateway.batch.lines import BatchLine, request_id
from services.gateway.embeddings.exchange import EmbeddingReader
from services.gateway.embeddings.schema import EMBEDDINGS_PATH
from services.gateway.request.endpoint import AnswerFactory, CompletionReader, Reader
from services.gateway.request.exchange import OutputSignal
from services.gateway.request.formats import ChatFormat, CompletionFormat
from services.gateway.request.intake import Arrival, Intake
from services.gateway.request.models import LoadableModels
from services.gateway.request.parse import MAX_TARGET_MS, Headers, ParsedRequest, parse_chat, parse_completion
from services.gateway.request.prompt import ServedModel

POLL_S = 0.02
"""The interval between checks for free capacity. There is no event for a change of credits."""

WITHOUT_POLL_S = 0.25
"""The interval between checks of a line that waits for workers of its model."""


class Slots:
    def __init__(self, load: Callable[[], GatewayLoad], *, share: float, max_in_flight: int) -> None:
        self._load = load
        self._share = share
        self._max_in_flight = max_in_flight
        self.in_flight = 0
        # One event for each waiting share, in order. Otherwise a share that takes its next slot at once would starve
        # the others.
        self._waiting: deque[asyncio.Event] = deque()
        self._returning: deque[asyncio.Event] = deque()
        """One event for each line that needs its slot back.

        Lines come before shares, which would otherwise starve them.
        """

    async def take(self, give_up: Callable[[], object]) -> bool:
        """Wait for a slot, which the caller returns with `give`. Return False if `give_up()` becomes true first."""
        found = await self._turn(self._waiting, give_up)
        self.in_flight += found
        return found

    async def without(self, until: Callable[[], bool]) -> None:
        """Release the caller's slot until `until()` is true and a slot is free again."""
        self.give()
        try:
            while True:
                if until() and await self._turn(self._returning, lambda: not until()):
                    return
                await asyncio.sleep(WITHOUT_POLL_S)
        finally:
            self.in_flight += 1  # the caller returns this slot, however the wait ends

    def give(self) -> None:
        self.in_flight -= 1
        self._wake_first()

    async def _turn(self, queue: deque[asyncio.Event], give_up: Callable[[], object]) -> bool:
        """Wait until this is the first entry of the queues and a slot is free.

        Return False if `give_up()` becomes true first.
        """
        turn = asyncio.Event()
        queue.append(turn)
        try:
            while not give_up():
                if self._first is turn and self._is_free():
                    return True
                turn.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await turn.wait()
            return False
        finally:
            queue.remove(turn)
            self._wake_first()

    @property
    def _first(self) -> asyncio.Event | None:
        return next(chain(self._returning, self._waiting), None)

    def _is_free(self) -> bool:
        return self.in_flight < allowed(self._load(), self._share, self._max_in_flight)

    def _wake_first(self) -> None:
        if (first := self._first) is not None:
            first.set()


# The age at which the set of served models is refreshed.
LOOK_S = 0.25
# The time without a look-up after which the state of a model is forgotten, because it may have had workers meanwhile.
FORGET_S = 10.0


class ServedModels:
    def __init__(self, views: Callable[[], Sequence[WorkerView]], models: Sequence[str], clock: Clock) -> None:
        self._views = views
        self._models = models
        self._clock = clock
        self._looked_ns = 0
        self._served: frozenset[str] = frozenset()
        self._away: dict[str, tuple[int, int]] = {}
        """The time since which a model has had no workers, and the time of its last look-up, in ns."""

    def has(self, model: str) -> bool:
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns >= LOOK_S * 1e9:
            views = self._views()
            self._looked_ns, self._served = now_ns, frozenset(name for name in self._models if serves(views, name))
        return model in self._served

    def away_s(self, model: str) -> float:
        """Return the seconds for which the model has had no workers while other models had some."""
        if self.has(model) or not self._served:
            self._away.pop(model, None)
            return 0.0
        now_ns = self._clock.now_ns()
        since_ns, requested_ns = self._away.get(model, (now_ns, now_ns))
        if now_ns - requested_ns > FORGET_S * 1e9:
            since_ns = now_ns
        self._away[model] = since_ns, now_ns
        return (now_ns - since_ns) / 1e9


# A high target, so that batch lines that are running delay interactive prompts as little as possible.
TPOT_TARGET_MS = 1_000.0
# A line fails if its model has had no workers for this long while other models had some. Otherwise it would delay lines
# of other jobs.
AWAY_S = 120.0
# The maximum number of times that a line is run after workers failed it.
MAX_ATTEMPTS = 3
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0

MAX_IMAGE_BYTES: Final = 256 * 1024 * 1024
"""The bound on the size of images of all running lines.

Further lines with images release their slot while they wait, so that other lines continue.
"""

_ROUTES: Mapping[str, Reader] = {
    "/v1/chat/completions": CompletionReader(parse_chat, ChatFormat),
    "/v1/completions": CompletionReader(parse_completion, CompletionFormat),
    EMBEDDINGS_PATH: EmbeddingReader(),
}


class LineRequester:
    def __init__(
        self,
        intake: Intake,
        dispatcher: Dispatcher,
        slots: Slots,
        served: ServedModels,
        clock: Clock,
        *,
        loadable: LoadableModels | None = None,
    ) -> None:
        """Create the requester.

        Each running line occupies one of `slots`. `loadable` contains the models loaded on demand.
        """
        self._loadable = loadable
        self._slots = slots
        self._served = served
        self._intake = intake
        self._dispatcher = dispatcher
        self._clock = clock
        self._image_bytes = 0
        """An upper bound of the size of the images of all running lines."""

    async def ask(self, share: Share, line: BatchLine) -> object:
        """Run a line and return its answer. Raise FulcrumError if the line is at fault.

        The call waits for workers and for room in the queue. Raise NoWorkersForLong if waiting longer would delay lines
        of other models.
        """
        backoff = Backoff(first_s=BACKOFF_FIRST_S, max_s=BACKOFF_MAX_S)
        attempts = 0
        while True:
            try:
                return await self._ask(share, line)
            except NoWorkersForLong:
                raise
            except (QueueFull, NoWorkers):
                pass
            except SequenceFailed:
                attempts += 1
                if attempts == MAX_ATTEMPTS:
                    raise
            await asyncio.sleep(backoff.next_s())

    def _is_served(self, model: str) -> bool:
        """Return whether the model has workers.

        Raise NoWorkersForLong, or UnknownModel if the model was removed.
        """
        fault = self._loadable.fault(model) if self._loadable else ""
        if self._served.away_s(model) >= AWAY_S:
            why = f": {fault}" if fault else ""
            raise NoWorkersForLong(f"model {model!r} has had no workers for {AWAY_S:g} s, while others had some{why}")
        return self._served.has(model)

    async def _ask(self, share: Share, line: BatchLine) -> object:
        if share.endpoint not in _ROUTES:
            raise UnsupportedField(f"this gateway has no endpoint {quoted(share.endpoint)}", param="endpoint")
        parsed, answer = await _ROUTES[share.endpoint].read(line.body, self._arrival(share, line))
        if parsed.stream:
            raise UnsupportedField("a batch line cannot be streamed", param="stream")
        model = self._intake.model(parsed, frozenset(share.models))
        with self._loadable.line(model.routed, model.adapter_name) if self._loadable else nullcontext():
            if not self._served.has(model.routed):
                with self._loadable.wakes(model.routed) if self._loadable else nullcontext():
                    await self._slots.without(lambda: self._is_served(model.routed))
            async with self._image_room(self._intake.max_image_bytes(parsed)):
                return await self._answer(share, line, parsed, answer, model)

    @asynccontextmanager
    async def _image_room(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait until a line's images fit besides those of other lines.

        Reserve room for them while the context is open.
        """

        def fits() -> bool:
            return self._image_bytes + size_bytes <= MAX_IMAGE_BYTES

        if size_bytes and not fits():
            await self._slots.without(fits)
        self._image_bytes += size_bytes
        try:
            yield
        finally:
            self._image_bytes -= size_bytes

    def _arrival(self, share: Share, line: BatchLine) -> Arrival:
        now_ns = self._clock.now_ns()
        return Arrival(request_id(share.job_id, line.place), now_ns, _headers(share, line, now_ns))

    async def _answer(
        self, share: Share, line: BatchLine, parsed: ParsedRequest, answer: AnswerFactory, model: ServedModel
    ) -> object:
        arrival = self._arrival(share, line)  # a new time, because the line may have waited for its model
        signal = OutputSignal()
        self._dispatcher.check_room(parsed.choices)  # images are not fetched again for each attempt
        parsed = await self._intake.fetched(parsed, model, arrival)
        choices = await self._intake.choices(parsed, model, arrival, signal.changed)
        exchange = answer(choices, model, arrival, signal=signal, headers={})
        error: FulcrumError | None = None
        try:
            self._dispatcher.submit([choice.generation for choice in choices])
            return await exchange.reply()
        except FulcrumError as failed:
            error = failed
            raise
        finally:
            for choice in choices:
                self._dispatcher.cancel(choice.generation, error)


def _headers(share: Share, line: BatchLine, now_ns: int) -> Headers:
    left_ns = share.expires_unix_ns - now_ns
    return Headers(
        request_id=request_id(share.job_id, line.place),
        tenant=share.tenant or DEFAULT_TENANT,
        service_class=BATCH_CLASS,
        ttft_deadline_ms=min(max(left_ns / 1e6, 1.0), MAX_TARGET_MS),
        tpot_target_ms=TPOT_TARGET_MS,
        traceparent="",
        details=False,
    )
