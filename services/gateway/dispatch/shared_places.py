"""Exchanges tenants' held and wanted decode places between gateways, through the ledger."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from libs.dispatch.dispatcher import Dispatcher
from libs.dispatch.places import ModelPlaces, Others
from libs.dispatch.ports import Tenancy
from libs.stores.limits import Ledger, LedgerDown

log = structlog.get_logger()

# Interval between two exchanges.
TELL_S: Final = 0.25
# A gateway with nothing to report reads the others' reports at one of this many intervals.
LISTEN_EVERY: Final = 4
# Bound on a tenant's choices and places; a report with more does not come from a gateway.
MAX_COUNT: Final = 1_000_000
# Bound on tenants and on models in one report: shares are computed over all of them at each turn.
MAX_TENANTS: Final = 4096
_MODELS: Final = msgspec.json.Decoder(dict[str, ModelPlaces])


class SharedPlaces:
    """One gateway's side of the exchange."""

    def __init__(self, dispatcher: Dispatcher, ledger: Ledger, tenants: Tenancy, gateway_id: str) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._tenants = tenants
        self._gateway_id = gateway_id
        self._has_report = False
        """Whether others may hold a report of this gateway."""
        self._quiet_intervals = 0
        """The number of consecutive intervals without an exchange."""
        self._left = False
        self._is_away = False
        self._exchanging = asyncio.Lock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            if self._tenants.told_apart:
                await self.tell()

    async def tell(self) -> None:
        """Exchange reports once.

        A gateway with nothing to share reports that once and then only reads now and then. While the ledger is away
        each gateway shares what it holds itself.
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
                    log.warning("Redis does not answer: this gateway shares the places that it holds", error=str(error))
                self._is_away, found = True, {}
            else:
                self._is_away, self._has_report = False, bool(own)
            self._dispatcher.places_elsewhere(self._others(found))

    async def leave(self) -> None:
        """Withdraw this gateway's report from the ledger."""
        self._left = True
        async with self._exchanging:
            if self._has_report:
                with suppress(LedgerDown):  # which forgets it soon
                    await self._ledger.exchange(self._gateway_id, b"")
                self._has_report = False

    def _is_due(self, own: Mapping[str, ModelPlaces]) -> bool:
        """Return whether there is something to report, or it is time to read."""
        if own or self._has_report or self._quiet_intervals + 1 >= LISTEN_EVERY:
            self._quiet_intervals = 0
            return True
        self._quiet_intervals += 1
        return False

    def _others(self, reports: Mapping[str, bytes]) -> Others:
        found = [(name, read(reports[name])) for name in sorted(reports)]
        before = tuple(report for name, report in found if name < self._gateway_id)
        return Others(before, tuple(report for name, report in found if name > self._gateway_id))


def read(report: bytes) -> Mapping[str, ModelPlaces]:
    """Parse a gateway's report, by model; return nothing if it is malformed."""
    try:
        models = _MODELS.decode(report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if len(models) + sum(len(found.tenants) for found in models.values()) > MAX_TENANTS:
        return {}
    counts = (each for found in models.values() for count in (*found.tenants.values(), (found.free,)) for each in count)
    return models if all(0 <= each <= MAX_COUNT for each in counts) else {}
