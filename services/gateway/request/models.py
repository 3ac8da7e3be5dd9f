"""The models of the catalogue at this gateway: the answers to expect while they load, and reports of their use."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from libs.contracts.errors import FulcrumError, NoWorkers, StartupError, UnknownModel, quoted
from libs.model.info import load_model_info
from libs.model.tokenizer import Tokenizer, load_tokenizer
from libs.runtime.clock import Clock
from libs.stores.catalogue import (
    Catalogued,
    CatalogueDown,
    LoadTimes,
    ModelCatalogue,
    ModelEntry,
    ModelOutlook,
    ModelUse,
)
from services.gateway.request.prompt import Catalog, ServedModel

# The loading speed assumed for a model that was never loaded, as long as the planner has no estimate.
GUESSED_BYTES_PER_S: Final = 1e9
# The bounds of a random factor. It scales Retry-After, so that clients do not all return at the same moment.
MARGIN: Final = 1.1
SPREAD: Final = 1.3
FAILED_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A model's entry in the catalogue, with the estimates of its loading time."""

    entry: ModelEntry
    times: LoadTimes | None
    outlook: ModelOutlook | None

    def wait_s(self, now_ms: float) -> float:
        """Return the expected seconds until workers serve the model; 0 if they do."""
        outlook = self.outlook
        if outlook is None:
            return self.times.load_s if self.times else self.entry.size_bytes / GUESSED_BYTES_PER_S
        if outlook.ready_unix_ms:
            return max(outlook.ready_unix_ms - now_ms, 0.0) / 1000
        return outlook.wait_s


def gives_up(expected: Expected, waited_s: float, most_s: float, now_ms: float, draw: float) -> FulcrumError | None:
    """Return the error that ends a request's wait for a model, or None if the request may wait.

    `draw` is a random number in 0..1, which spreads the times at which clients retry.
    """
    name = quoted(expected.entry.name)
    if expected.outlook is not None and expected.outlook.error:
        error = expected.outlook.error
        return NoWorkers(f"model {name} cannot be loaded: {error}", retry_after_s=spread(FAILED_RETRY_S, draw))
    left_s = expected.wait_s(now_ms)
    if waited_s + left_s <= most_s:
        return None
    return NoWorkers(
        f"model {name} is not loaded, and is expected to be in {left_s:.0f} s: longer than the {most_s:g} s that a"
        " request waits",
        retry_after_s=spread(max(left_s, 1.0), draw),
    )


def removed(name: str) -> UnknownModel:
    """Return the error for a request whose model was removed while the request waited."""
    return UnknownModel(f"model {quoted(name)} was removed while the request waited for it", param="model")


def spread(seconds: float, draw: float) -> float:
    """Multiply a wait by a factor that depends on `draw` in 0..1, and round up to whole seconds."""
    return math.ceil(seconds * (MARGIN + draw * (SPREAD - MARGIN)))


log = structlog.get_logger()

# The interval between reports of use. The first request to a model without workers is reported at once.
REPORT_S: Final = 0.2
LEASE_MS: Final = 3_000
RENEW_S: Final = 1.0
# The time between a request's arrival and its entry into the queue.
ARRIVING_MS: Final = 300
# The delay after Retry-After within which a client is still expected to return.
GRACE_MS: Final = 3_000
# The bound on idle models outside the catalogue whose counts are kept.
MAX_SPENT: Final = 2_000


@dataclass(slots=True)
class _Use:
    arrivals: int = 0
    last_ms: int = 0
    in_flight: int = 0
    waiting_since_ms: int = 0
    promised_ms: int = 0
    lines: int = 0
    """The number of batch lines that wait for the model outside the queue."""
    lines_in_flight: int = 0
    """The number of batch lines in flight, including those that wait."""
    lines_alone: bool = False
    """True if only batch lines waited at the last report."""
    cold_ms: int = 0
    """The time of the last request that found no worker serving the model."""


class LoadableModels:
    """The models of the catalogue at this gateway. Two tasks follow the catalogue and report use to it."""

    def __init__(
        self,
        store: ModelCatalogue,
        catalog: Catalog,
        clock: Clock,
        *,
        gateway_id: str,
        max_wait_s: float,
        waiting: Callable[[str], int],
        served: Callable[[str], bool],
        draw: Callable[[], float],
    ) -> None:
        """Create the follower.

        `waiting` returns the number of queued requests for a model without workers. `served` returns whether workers
        serve a model. `draw` returns a random number in 0..1.
        """
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._gateway_id = gateway_id
        self._max_wait_s = max_wait_s
        self._waiting = waiting
        self._served = served
        self._draw = draw
        self._found = Catalogued()
        self._was_lost = False
        self._broken: dict[str, str] = {}
        """The models whose files or tokenizer cannot be loaded here, with the reason."""
        # By the model's folder and its chat template's file, which is empty for the model's own template.
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}
        self._uses: dict[str, _Use] = {}
        self._news = asyncio.Event()
        self.refused = 0
        """The number of requests refused because loading their model would take too long."""

    # ------------------------------------------------------------ for requests

    @property
    def has_models(self) -> bool:
        return bool(self._found.entries)

    def state(self, name: str) -> tuple[str, float] | None:
        """Return a model's state and the expected seconds until it serves, or None if it is not in the catalogue."""
        expected = self._expected(name)
        if expected is None:
            return None
        if self._served(expected.entry.parent or name):
            return "serving", 0.0
        state = expected.outlook.state if expected.outlook else "unknown"
        return ("loading" if state == "serving" else state), expected.wait_s(self._now_ms())

    @contextmanager
    def requested(self, name: str, adapter: str = "") -> Iterator[float]:
        """Count a request to a model or adapter until the context ends.

        Yield the expected seconds until the model serves. Raise NoWorkers if that is longer than requests may wait.
        """
        with self._counted(adapter), self._waiting_for(name) as wait_s:
            yield wait_s

    @contextmanager
    def _waiting_for(self, name: str) -> Iterator[float]:
        expected = self._expected(name)
        if expected is None:
            yield 0.0
            return
        wait_s = 0.0
        with self._in_flight(name) as use:
            if not self._served(name):
                use.cold_ms = use.last_ms
                self._news.set()
                wait_s = self._admit(name, expected, use)
            yield wait_s

    @contextmanager
    def _counted(self, adapter: str) -> Iterator[None]:
        """Count a request to an adapter in addition to its base model. Only the base model may have to be loaded."""
        if adapter not in self._found.entries:
            yield
            return
        with self._in_flight(adapter):
            yield

    @contextmanager
    def _in_flight(self, name: str) -> Iterator[_Use]:
        """Count an arrival, and count it as in flight until the context ends."""
        use = self._uses.setdefault(name, _Use())
        use.arrivals += 1
        use.last_ms = round(self._now_ms())
        use.in_flight += 1
        try:
            yield use
        finally:
            use.in_flight -= 1

    def _admit(self, name: str, expected: Expected, use: _Use) -> float:
        if name in self._broken:
            raise NoWorkers(f"model {name!r} cannot be served here: {self._broken[name]}")
        error = gives_up(expected, 0.0, self._max_wait_s, self._now_ms(), self._draw())
        if error is not None:
            self.refused += 1
            if error.retry_after_s is not None:
                use.promised_ms = round(self._now_ms() + error.retry_after_s * 1000) + GRACE_MS
            raise error
        return expected.wait_s(self._now_ms())

    # ------------------------------------------------------------ for batch jobs

    @contextmanager
    def line(self, name: str, adapter: str = "") -> Iterator[None]:
        """Count a batch line until the context ends. Lines may wait longer than interactive requests."""
        with self._counted(adapter), self._line(name):
            yield

    @contextmanager
    def _line(self, name: str) -> Iterator[None]:
        if name not in self._found.entries:
            yield
            return
        with self._in_flight(name) as use:
            use.lines_in_flight += 1
            try:
                yield
            finally:
                use.lines_in_flight -= 1

    @contextmanager
    def wakes(self, name: str) -> Iterator[None]:
        """Count a batch line that waits outside the queue, so that the planner loads the model for it."""
        use = self._uses.setdefault(name, _Use())
        use.lines += 1
        self._news.set()
        try:
            yield
        finally:
            use.lines -= 1

    def fault(self, name: str) -> str:
        """Return the last known reason for which the model cannot be loaded, or an empty string.

        Raise UnknownModel if the model was removed.
        """
        expected = self._expected(name)
        if expected is None:
            if self.covers(name):
                raise removed(name)
            return ""
        outlook = expected.outlook
        return self._broken.get(name) or (outlook.error if outlook else "")

    # ------------------------------------------------------------ for the queue

    def covers(self, name: str) -> bool:
        """Return whether this catalogue decides on waits for the model. It does not for models in the settings."""
        return name not in self._catalog.own

    def ends(self, name: str, waited_s: float, *, begun: bool = False) -> FulcrumError | None:
        """Return the error that ends a request's wait for a model without workers, or None if the request may wait.

        If the answer has `begun`, a long loading estimate alone does not end the wait.
        """
        expected = self._expected(name)
        if expected is None:
            return removed(name)
        if begun and waited_s <= self._max_wait_s and not (expected.outlook and expected.outlook.error):
            return None
        return gives_up(expected, waited_s, self._max_wait_s, self._now_ms(), self._draw())

    # ------------------------------------------------------------ tasks

    async def follow(self) -> None:
        """Follow the catalogue until cancelled. While it is unreachable, the last known state remains in force."""
        async for found in self._store.watch():
            await self.take(found)

    async def take(self, found: Catalogued) -> None:
        """Apply a new state of the catalogue.

        An empty catalogue that may have been lost is ignored once, because the planner refills a Redis that lost its
        data.
        """
        if self._found.entries and found.is_lost and not self._was_lost:
            self._was_lost = True
            return
        self._was_lost = False
        if found.entries != self._found.entries:
            for gone in self._broken.keys() - found.entries.keys():
                del self._broken[gone], self._catalog.broken[gone]
            entries = found.entries.values()
            models = {each.name: await self._model(each) for each in entries if not each.parent}
            served = {**models, **self._catalog.own}
            adapters = [self._adapter(each, served.get(each.parent)) for each in entries if each.parent]
            self._catalog.replace_added(filter(None, (*models.values(), *adapters)))
        self._found = found

    async def _model(self, entry: ModelEntry) -> ServedModel | None:
        name, source = entry.name, entry.source
        template = self._catalog.format_names.template(name)
        try:
            info = await asyncio.to_thread(load_model_info, source, name)
            if (source, template) not in self._tokenizers:
                self._tokenizers[source, template] = await asyncio.to_thread(load_tokenizer, info, template)
        except StartupError as error:
            self._breaks(name, error.message)
            return None
        self._mended(name)
        tokenizer = self._tokenizers[source, template]
        return ServedModel(info, tokenizer, entry.ttft_ms, entry.tpot_ms, self._catalog.format_names)

    def _adapter(self, entry: ModelEntry, model: ServedModel | None) -> ServedModel | None:
        """Return the model that serves an adapter's entry, or None if its base model is not served."""
        if model is None or model.base:
            self._breaks(entry.name, f"it is an adapter of {entry.parent}, which is not a model that is served here")
            return None
        self._mended(entry.name)
        return replace(
            model,
            info=replace(model.info, name=entry.name),
            base=entry.parent,
            adapter_source=entry.source,
            ttft_ms=entry.ttft_ms or model.ttft_ms,
            tpot_ms=entry.tpot_ms or model.tpot_ms,
        )

    def _breaks(self, name: str, message: str) -> None:
        if self._broken.get(name) != message:
            log.warning("a model of the catalogue cannot be served here", model=name, error=message)
        self._broken[name] = self._catalog.broken[name] = message

    def _mended(self, name: str) -> None:
        self._broken.pop(name, None)
        self._catalog.broken.pop(name, None)

    async def report(self) -> None:
        """Report the use of models until cancelled: on every change, and at intervals while requests run or are
        promised.
        """
        said: Mapping[str, ModelUse] = {}
        said_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            uses = self.uses()
            runs = any(each.in_flight or each.promised_unix_ms for each in uses.values())
            if uses != said or (runs and loop.time() - said_s >= RENEW_S):
                with suppress(CatalogueDown):
                    await self._store.use(self._gateway_id, uses, lease_ms=LEASE_MS)
                    said, said_s = uses, loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._news.wait()
                    self._news.clear()
                    await asyncio.sleep(0)  # changes of the same turn are sent together

    def uses(self) -> dict[str, ModelUse]:
        """Return the current use of each model in the form that is reported."""
        now_ms = round(self._now_ms())
        found = {}
        for name, use in self._uses.items():
            waiting = min(self._waiting(name) + use.lines, use.in_flight)
            # A new request may not be queued yet. An answer that its worker completes before it leaves does not wait.
            waiting = max(waiting, int(use.in_flight > 0 and now_ms - use.cold_ms < ARRIVING_MS))
            # All waiting requests beyond the number of interactive ones must be lines. Lines that a worker returned are
            # in the queue.
            lines_waiting = min(max(use.lines, waiting - (use.in_flight - use.lines_in_flight)), waiting)
            # The time since which interactive requests have waited. An earlier wait of batch lines does not count.
            began = (use.waiting_since_ms or now_ms) if waiting else 0
            use.waiting_since_ms = now_ms if use.lines_alone and waiting > lines_waiting else began
            use.lines_alone = 0 < waiting == lines_waiting
            found[name] = ModelUse(
                arrivals=use.arrivals,
                last_unix_ms=use.last_ms,
                waiting=waiting,
                waiting_since_unix_ms=use.waiting_since_ms,
                in_flight=use.in_flight,
                promised_unix_ms=use.promised_ms if use.promised_ms > now_ms else 0,
                lines_waiting=lines_waiting,
                lines_in_flight=use.lines_in_flight,
            )
        idle = [name for name, use in found.items() if not use.in_flight and name not in self._found.entries]
        for name in idle[: max(len(found) - MAX_SPENT, 0)]:
            del self._uses[name]
        return found

    def _expected(self, name: str) -> Expected | None:
        entry = self._found.entries.get(name)
        if entry is None:
            return None
        return Expected(entry, self._found.times.get(name), self._found.outlooks.get(name))

    def _now_ms(self) -> float:
        return self._clock.now_ns() / 1e6
