"""A service's table of keys, which is FOLLOW_S behind their store at most."""

import asyncio
from typing import Final

import structlog

from libs.contracts.errors import StartupError, StoreUnavailable
from libs.keys.book import KeyBook
from libs.keys.place import IN_REDIS
from libs.keys.port import KeyStore
from libs.keys.table import KeyTable
from libs.runtime.clock import Clock
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import PLAINTEXT_VARIABLE, TLS_VARIABLES, is_loopback
from libs.runtime.settings import CommonSettings

log = structlog.get_logger()

FOLLOW_S: Final = 0.5
"""Between two looks at the store: a key that is revoked lets nobody in after this, the store's answer and a second look
that one lost call costs, within two seconds."""


async def start_keys(settings: HttpSettings, store: KeyStore, clock: Clock) -> KeyTable:
    """The table with what the store has now. Raises StartupError for a file that cannot be used, and for a listener
    beyond loopback that would let everybody in."""
    trusted = _trusted(settings)
    table = KeyTable(open_without_keys=trusted, token=settings.token.get_secret_value())
    try:
        found = await store.load()
        assert found is not None
        book = found.book
        if book.keys and not book.cache_secret:  # made by a release that had none
            book = await store.change(KeyBook.with_cache_secret)
        table.replace(book, clock.now_ns() / 1e9)
    except StoreUnavailable as error:
        if settings.keys != IN_REDIS:
            raise StartupError(error.message) from None
        log.warning("no request is answered until it is known which keys there are", error=error.message)
        return table
    if not (trusted or table.closed):
        raise StartupError(
            f"anybody could call the REST API on {settings.host}: make a key with `fulcrum keys create`, or set"
            f" {TLS_VARIABLES} or FULCRUM_TOKEN with {PLAINTEXT_VARIABLE} on a network that you trust, or"
            " FULCRUM_HOST=127.0.0.1"
        )
    return table


async def follow_keys(store: KeyStore, table: KeyTable, clock: Clock) -> None:
    """Take each change of the store, until cancelled. While it does not answer the last known keys count."""
    version, away = "", False
    while True:
        try:
            found = await store.load(version)
            if found is not None:
                if version and table.closed and not found.book.keys:
                    log.warning("the store has lost all API keys: nobody is let in until there are some again")
                version = found.version
                table.replace(found.book, clock.now_ns() / 1e9)
            away = False
        except StoreUnavailable as error:
            if not away:
                log.warning("the store of API keys does not answer: the last known ones count", error=error.message)
            away = True
        await asyncio.sleep(FOLLOW_S)


def _trusted(settings: CommonSettings) -> bool:
    """Whether whoever reaches the listener may be let in without a key: this machine's own processes, or those of a
    network for which the operator has said how its parts trust one another."""
    if is_loopback(f"{settings.host}:0") or settings.tls_cert:
        return True
    return bool(settings.token.get_secret_value()) and settings.allow_plaintext_token
