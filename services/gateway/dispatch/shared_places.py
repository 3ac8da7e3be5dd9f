"""Gateways tell each other, through the ledger, what tenants have and want of places to decode."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from libs.dispatch.dispatcher import Dispatcher
from libs.dispatch.places import ModelPlaces, Others
from libs.dispatch.ports import Tenancy
from libs.stores.limits.port import Ledger, LedgerDown

log = structlog.get_logger()

TELL_S: Final = 0.25
"""Between two times that gateways tell each other."""
LISTEN_EVERY: Final = 4
"""Of these times a gateway that has nothing to tell asks what others have at one."""
MAX_COUNT: Final = 1_000_000
"""Of a tenant's choices, and of places: a report with more is none of a gateway's."""
MAX_TENANTS: Final = 4096
"""In one report, as many as it has models: shares are computed over all of them at each turn."""
_MODELS: Final = msgspec.json.Decoder(dict[str, ModelPlaces])


class SharedPlaces:
    """One gateway's part."""

    def __init__(self, dispatcher: Dispatcher, ledger: Ledger, tenants: Tenancy, gateway_id: str) -> None:
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._tenants = tenants
        self._gateway_id = gateway_id
        self._told = False
        """Whether others have something of this gateway's, or may have."""
        self._kept_quiet = 0
        """Times in a row."""
        self._left = False
        self._is_away = False
        self._exchanging = asyncio.Lock()

    async def run(self) -> None:
        """Tell and hear, until cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            if self._tenants.told_apart:
                await self.tell()

    async def tell(self) -> None:
        """Once. A gateway with nothing to share says so once, and then only asks now and then. Where the ledger is away
        each gateway shares what it holds."""
        async with self._exchanging:
            own = self._dispatcher.places_here()
            if self._left or not self._speaks(own):
                return
            self._told = self._told or bool(own)
            try:
                found = await self._ledger.exchange(self._gateway_id, msgspec.json.encode(own) if own else b"")
            except LedgerDown as error:
                if not self._is_away:
                    log.warning("Redis does not answer: this gateway shares the places that it holds", error=str(error))
                self._is_away, found = True, {}
            else:
                self._is_away, self._told = False, bool(own)
            self._dispatcher.places_elsewhere(self._others(found))

    async def leave(self) -> None:
        """Take back what others have of this gateway's, and say no more."""
        self._left = True
        async with self._exchanging:
            if self._told:
                with suppress(LedgerDown):  # which forgets it soon
                    await self._ledger.exchange(self._gateway_id, b"")
                self._told = False

    def _speaks(self, own: Mapping[str, ModelPlaces]) -> bool:
        """Whether there is something to tell, or it is time to ask."""
        if own or self._told or self._kept_quiet + 1 >= LISTEN_EVERY:
            self._kept_quiet = 0
            return True
        self._kept_quiet += 1
        return False

    def _others(self, reports: Mapping[str, bytes]) -> Others:
        found = [(name, read(reports[name])) for name in sorted(reports)]
        before = tuple(report for name, report in found if name < self._gateway_id)
        return Others(before, tuple(report for name, report in found if name > self._gateway_id))


def read(report: bytes) -> Mapping[str, ModelPlaces]:
    """What a gateway has, by model; nothing where the report is none of a gateway's."""
    try:
        models = _MODELS.decode(report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if len(models) + sum(len(found.tenants) for found in models.values()) > MAX_TENANTS:
        return {}
    counts = (each for found in models.values() for count in (*found.tenants.values(), (found.free,)) for each in count)
    return models if all(0 <= each <= MAX_COUNT for each in counts) else {}
