"""Synchronize a service's table of keys with their store, at most `FOLLOW_S` behind it."""

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
"""The interval between two reads of the store.

A revoked key is refused within two seconds: this interval, the store's answer, and a second read after a failed
one.
"""


async def start_keys(settings: HttpSettings, store: KeyStore, clock: Clock) -> KeyTable:
    """Return the table with the present contents of the store.

    Raise StartupError for an unusable file, and for a listener beyond loopback that would admit everybody.
    """
    trusted = _trusted(settings)
    table = KeyTable(open_without_keys=trusted, token=settings.token.get_secret_value())
    try:
        found = await store.load()
        assert found is not None
        book = found.book
        if book.keys and not book.cache_secret:  # created by an older release
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
    """Apply each change of the store to the table until cancelled; while it is away, the last known keys hold."""
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
    """Return whether callers that reach the listener may be admitted without a key.

    They are this machine's own processes, or those of a network whose mutual trust the operator has configured.
    """
    if is_loopback(f"{settings.host}:0") or settings.tls_cert:
        return True
    return bool(settings.token.get_secret_value()) and settings.allow_plaintext_token
