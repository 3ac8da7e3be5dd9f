"""Enforcement of tenants' limits, and fair shares of decode places, over all gateways by means of a ledger in Redis.

The limits apply to requests and tokens per minute, GPU time per day, and concurrent choices. While the ledger is
unreachable, each gateway enforces its share of every limit alone.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import structlog

from libs.contracts.errors import InvalidRequest, RateLimited
from libs.dispatch.dispatcher import Dispatcher
from libs.dispatch.places import ModelPlaces, Others
from libs.dispatch.ports import Tenancy
from libs.keys.book import TenantLimits
from libs.keys.table import KeyTable
from libs.policy.gateway.usage import SLOTS, Lease, MinuteWindow, ahead, local_share, written_s
from libs.runtime.clock import Clock
from libs.stores.limits import SPANS, Kind, Ledger, LedgerDown

log = structlog.get_logger()

# The interval between two settlements of leases and places with the ledger.
SWEEP_S: Final = 0.5
# After a failure, the ledger is not called for this long, so that requests do not all wait for it.
AWAY_S: Final = 1.0
# A refused tenant is refused again for this long without a call to the ledger, so that retries cost little.
REFUSED_S: Final = 0.1
# The Retry-After of requests above the concurrency limit. The gateway cannot predict when running ones end.
BUSY_RETRY_S: Final = 1.0


@dataclass(slots=True)
class _TenantUse:
    """One tenant's use of one limit at this gateway."""

    own: MinuteWindow
    """The use at this gateway, from which it enforces its share while the ledger is unreachable."""
    lease: Lease = field(default_factory=Lease)
    refused: tuple[float, int, float] = (0.0, 0, 0.0)
    """The ledger's last refusal: the time until which it is reused, the units refused, and the time at which to retry,
    in s.
    """
    left: int = 0
    """The units that all gateways together may still use, as of the ledger's last answer."""


@dataclass(slots=True)
class _Tenant:
    limits: TenantLimits
    uses: dict[Kind, _TenantUse] = field(
        default_factory=lambda: {kind: _TenantUse(MinuteWindow(span)) for kind, span in SPANS.items()}
    )
    running: int = 0
    """The number of running choices. A request counts as one until its number of choices is known."""
    coming: int = 0
    """The number of requests that are being admitted. While there are any, the tenant's record is not dropped."""
    places: int = 0
    """The number of concurrent choices that the ledger has granted this gateway."""
    # Held by the request that calls the ledger. Requests that wait for the lock use its result.
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def limit(self, kind: Kind) -> int | None:
        limits = self.limits
        match kind:
            case "requests":
                return limits.requests_per_minute
            case "tokens":
                return limits.tokens_per_minute
            case "gpu_ms":
                return None if limits.gpu_seconds_per_day is None else limits.gpu_seconds_per_day * 1000


class Allowance:
    """One request's use of its tenant's limits. This base class allows everything, for tenants without limits."""

    async def choices(self, _count: int) -> None:
        """Count this many choices as running.

        Raise RateLimited, or InvalidRequest if the number alone exceeds the limit.
        """

    async def prompt(self, _tokens: int) -> None:
        """Count the prompt's tokens. Raise RateLimited if they exceed the limit."""

    def output(self, _tokens: int) -> None:
        """Count the answer's tokens, even if they exceed the limit."""

    def headers(self) -> Mapping[str, str]:
        """Return response headers with the state of the limits, in OpenAI's format."""
        return {}

    def end(self) -> None: ...


FREE: Final = Allowance()


class _Limited(Allowance):
    """One request's use of the limits of a tenant that has some."""

    def __init__(self, limiter: "TenantLimiter", tenant: str, found: _Tenant) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._found = found
        self._running = 1

    async def choices(self, count: int) -> None:
        more = count - self._running
        if more > 0:
            await self._limiter.enter(self._tenant, self._found, more, choices=count)
            self._running = count

    async def prompt(self, tokens: int) -> None:
        await self._limiter.use(self._tenant, self._found, "tokens", tokens)

    def output(self, tokens: int) -> None:
        self._limiter.count(self._found, "tokens", tokens)

    def headers(self) -> Mapping[str, str]:
        return self._limiter.headers(self._found)

    def end(self) -> None:
        self._found.running -= self._running


class TenantLimiter:
    def __init__(self, table: KeyTable, ledger: Ledger, clock: Clock, gateway_id: str) -> None:
        self._table = table
        self._ledger = ledger
        self._clock = clock
        self._gateway_id = gateway_id
        # The tenants with limits that have sent requests recently. Their number is bounded by the number of limits.
        self._tenants: dict[str, _Tenant] = {}
        self._gateways = 1
        """The number of gateways that share the limits, as of the ledger's last answer."""
        self._away_until_s = 0.0

    async def admit(self, tenant: str) -> Allowance:
        """Admit a request, whose allowance the caller must end. Raise RateLimited."""
        found = self._known(tenant)
        if found is None:
            return FREE
        found.coming += 1
        try:
            await self.enter(tenant, found)
        finally:
            found.coming -= 1
        try:
            await self.use(tenant, found, "requests", 1)
            if found.limits.gpu_seconds_per_day is not None:
                await self.use(tenant, found, "gpu_ms", 1)  # the amount is known only at its end
        except BaseException:
            found.running -= 1
            raise
        return _Limited(self, tenant, found)

    async def use(self, tenant: str, found: _Tenant, kind: Kind, units: int) -> None:
        """Use units of a limit. Raise RateLimited if the limit has no room for them."""
        if found.limit(kind) is not None and found.uses[kind].lease.need(units) > 0:
            async with found.asking:
                if found.uses[kind].lease.need(units) > 0:
                    await self._take(tenant, found, kind, units)
        self.count(found, kind, units)

    def count(self, found: _Tenant, kind: Kind, units: int) -> None:
        """Count units, even if they exceed the limit."""
        if found.limit(kind) is not None:
            found.uses[kind].lease.spend(units, self._now_s)
            found.uses[kind].own.add(units, self._now_s)

    def limits_gpu_time(self, tenant: str) -> bool:
        limits = None if self._table.is_open else self._table.limits.get(tenant)
        return limits is not None and limits.gpu_seconds_per_day is not None

    async def check_gpu_time(self, tenant: str) -> None:
        """Raise RateLimited if the tenant has no GPU time left."""
        found = self._known(tenant)
        if found is not None:
            await self.use(tenant, found, "gpu_ms", 1)

    def spent_gpu_ms(self, tenant: str, spent_ms: int) -> None:
        """Count the GPU time of an ended choice, even if it exceeds the limit."""
        found = self._known(tenant)
        if found is not None and spent_ms > 0:
            self.count(found, "gpu_ms", spent_ms)

    def _known(self, tenant: str) -> _Tenant | None:
        limits = None if self._table.is_open else self._table.limits.get(tenant)
        if limits is None:
            return None
        found = self._tenants.setdefault(tenant, _Tenant(limits))
        found.limits = limits
        return found

    def headers(self, found: _Tenant) -> dict[str, str]:
        """Return response headers with the state of the limits, as far as this gateway has been informed."""
        said: dict[str, str] = {}
        for kind, use in found.uses.items():
            limit = found.limit(kind)
            if limit is not None:
                name = kind.replace("_", "-")
                said[f"x-ratelimit-limit-{name}"] = str(limit)
                said[f"x-ratelimit-remaining-{name}"] = str(min(max(use.left + use.lease.balance, 0), limit))
                said[f"x-ratelimit-reset-{name}"] = written_s(use.own.wait_s(limit, limit, self._now_s))
        return said

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._table.limits or self._tenants:
                await self.sweep()

    async def sweep(self) -> None:
        """Settle leases and places with the ledger, and drop the records of tenants without recent use."""
        try:
            self._gateways = await self._ledger.beat(self._gateway_id)
            for tenant, found in list(self._tenants.items()):
                await self._settle(tenant, found)
        except LedgerDown as error:
            self._is_away(error)

    async def _settle(self, tenant: str, found: _Tenant) -> None:
        for kind, use in found.uses.items():
            owed = use.lease.settle(self._now_s)
            if owed:
                try:
                    await self._ledger.add(tenant, kind, owed)
                except LedgerDown:
                    use.lease.balance -= owed
                    raise
        limit = found.limits.concurrent
        async with found.asking:
            if limit is not None and (found.running or found.places):
                want = found.running + ahead(limit) if found.running else 0
                found.places = await self._ledger.hold(
                    tenant, self._gateway_id, limit, running=found.running, want=want
                )
        if not (found.running or found.coming) and not any(use.own.used(self._now_s) for use in found.uses.values()):
            self._tenants.pop(tenant, None)

    async def enter(self, tenant: str, found: _Tenant, count: int = 1, *, choices: int = 1) -> None:
        """Count `count` more choices of a request with `choices` in total as running.

        Raise RateLimited, or InvalidRequest if the request alone exceeds the limit.
        """
        limit = found.limits.concurrent
        if limit is not None and choices > limit:
            text = (
                f"the request asks for {choices} choices at once, and tenant {tenant} may have {limit}: ask for fewer"
            )
            raise InvalidRequest(text, param="n")
        if limit is not None and found.running + count > found.places:
            async with found.asking:
                if found.running + count > found.places:
                    found.places = await self._places(tenant, found, limit, count)
        if limit is not None and found.running + count > found.places:
            text = f"tenant {tenant} has {found.running} choices running here and asks for {count} more: its limit is "
            text += f"{limit} at once over all gateways (each choice of n, and each prompt, counts)"
            raise RateLimited(text, retry_after_s=BUSY_RETRY_S, headers=self.headers(found))
        found.running += count

    async def _places(self, tenant: str, found: _Tenant, limit: int, count: int) -> int:
        if self._now_s >= self._away_until_s:
            try:
                want = found.running + count + ahead(limit)
                return await self._ledger.hold(tenant, self._gateway_id, limit, running=found.running, want=want)
            except LedgerDown as error:
                self._is_away(error)
        return local_share(limit, self._gateways)

    async def _take(self, tenant: str, found: _Tenant, kind: Kind, units: int) -> None:
        limit, use = found.limit(kind), found.uses[kind]
        assert limit is not None
        if self._now_s >= self._away_until_s:
            least = use.lease.need(units)
            until_s, need, lasts_s = use.refused
            if self._now_s < until_s and least >= need:
                raise self._refusal(tenant, found, kind, units, lasts_s - self._now_s)
            try:
                taken = await self._ledger.take(tenant, kind, limit, want=least + ahead(limit), least=least)
            except LedgerDown as error:
                self._is_away(error)
            else:
                use.lease.balance += taken.granted
                use.left = taken.left
                if not taken.granted:
                    use.refused = self._now_s + min(REFUSED_S, taken.wait_s), least, self._now_s + taken.wait_s
                    raise self._refusal(tenant, found, kind, units, taken.wait_s)
                return
        share = local_share(limit, self._gateways)
        wait_s = use.own.wait_s(share, units, self._now_s)
        if wait_s:
            raise self._refusal(tenant, found, kind, units, wait_s)

    def _refusal(self, tenant: str, found: _Tenant, kind: Kind, units: int, wait_s: float) -> RateLimited:
        limit = found.limit(kind)
        if kind == "gpu_ms":
            text = f"tenant {tenant} has used its limit of {(limit or 0) // 1000} GPU-seconds a day"
            return RateLimited(
                f"{text}: more are available in {written_s(wait_s)}", retry_after_s=wait_s, headers=self.headers(found)
            )
        bound = f"limit of {limit} {kind} a minute"
        text = f"tenant {tenant} has used its {bound}: room for this request in {written_s(wait_s)}"
        headers = self.headers(found)
        if limit is not None and units > limit:
            text = f"the request's {units} {kind} are more than the {bound} of tenant {tenant}"
            headers |= {"x-should-retry": "false"}  # no wait makes room for it
        return RateLimited(text, retry_after_s=min(wait_s, SLOTS), headers=headers)

    def _is_away(self, error: LedgerDown) -> None:
        if self._now_s >= self._away_until_s:
            log.warning(
                "Redis does not answer: this gateway applies its share of tenants' limits",
                gateways=self._gateways,
                error=str(error),
            )
        self._away_until_s = self._now_s + AWAY_S

    @property
    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9


# The interval between two exchanges.
EXCHANGE_EVERY_S: Final = 0.25
# A gateway with nothing to report reads other gateways' reports only once in this many intervals.
LISTEN_EVERY: Final = 4
# The bound on counts in a report. A report with larger ones cannot come from a gateway.
MAX_COUNT: Final = 1_000_000
# The bound on tenants and models in one report, because every exchange computes shares over all of them.
MAX_TENANTS: Final = 4096
_MODELS: Final = msgspec.json.Decoder(dict[str, ModelPlaces])


class PlaceExchange:
    def __init__(self, dispatcher: Dispatcher, ledger: Ledger, tenants: Tenancy, gateway_id: str) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._tenants = tenants
        self._gateway_id = gateway_id
        self._has_report = False
        """True if other gateways may still read a report from this one."""
        self._quiet_intervals = 0
        """The number of consecutive intervals without an exchange."""
        self._left = False
        self._is_away = False
        self._exchanging = asyncio.Lock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_EVERY_S)
            if self._tenants.are_distinct:
                await self.exchange()

    async def exchange(self) -> None:
        """Publish this gateway's report and read those of others.

        With nothing to report, a gateway withdraws its report once and then reads only occasionally. While the ledger
        is unreachable, it shares only its own places.
        """
        async with self._exchanging:
            own = self._dispatcher.places_here()
            if self._left or not self._is_due(own):
                return
            self._has_report = self._has_report or bool(own)
            try:
                found = await self._ledger.exchange(self._gateway_id, msgspec.json.encode(own) if own else b"")
            except LedgerDown as error:
                if not self._is_away:
                    log.warning(
                        "Redis does not answer: this gateway shares only its own decode places", error=str(error)
                    )
                self._is_away, found = True, {}
            else:
                self._is_away, self._has_report = False, bool(own)
            self._dispatcher.places_elsewhere(self._others(found))

    async def leave(self) -> None:
        """Withdraw this gateway's report from the ledger, and make no further exchanges."""
        self._left = True
        async with self._exchanging:
            if self._has_report:
                with suppress(LedgerDown):  # the report expires soon by itself
                    await self._ledger.exchange(self._gateway_id, b"")
                self._has_report = False

    def _is_due(self, own: Mapping[str, ModelPlaces]) -> bool:
        """Return whether this interval needs an exchange."""
        if own or self._has_report or self._quiet_intervals + 1 >= LISTEN_EVERY:
            self._quiet_intervals = 0
            return True
        self._quiet_intervals += 1
        return False

    def _others(self, reports: Mapping[str, bytes]) -> Others:
        found = [(name, read_places(reports[name])) for name in sorted(reports)]
        before = tuple(report for name, report in found if name < self._gateway_id)
        return Others(before, tuple(report for name, report in found if name > self._gateway_id))


def read_places(report: bytes) -> Mapping[str, ModelPlaces]:
    """Parse a gateway's report, by model. Return an empty mapping if it is malformed or too large."""
    try:
        models = _MODELS.decode(report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if len(models) + sum(len(found.tenants) for found in models.values()) > MAX_TENANTS:
        return {}
    counts = (each for found in models.values() for count in (*found.tenants.values(), (found.free,)) for each in count)
    return models if all(0 <= each <= MAX_COUNT for each in counts) else {}
