"""Access to the key store of the suite that a command talks to."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from libs.cli.find import find_one_suite, find_suite, local_user
from libs.keys.book import KeyBook, KeyChange, KeyStore
from libs.keys.store import open_keys
from libs.launch.ready import Ready
from libs.launch.settings import LaunchSettings
from libs.runtime.settings import load_settings


def change_book(ready_file: Path | None, edit: Callable[[KeyBook], KeyBook]) -> KeyBook:
    """Store the key book as `edit` returns it. Raises StoreUnavailable."""

    async def change() -> KeyBook:
        store = _open(find_one_suite(ready_file))
        try:
            return await store.change(edit)
        finally:
            await store.close()

    return asyncio.run(change())


def change_by(action: str, subject: str, tenant: str, detail: str = "") -> KeyChange:
    """Return the record of a change made now by this machine's user."""
    return KeyChange(time.time_ns(), local_user(), action, subject, tenant, detail)


def load_book(ready_file: Path | None) -> KeyBook:
    async def load() -> KeyBook:
        store = _open(find_suite(ready_file))
        try:
            found = await store.load()
            assert found is not None
            return found.book
        finally:
            await store.close()

    return asyncio.run(load())


def _open(suite: Ready) -> KeyStore:
    """Open the store of a running suite, else the one that the environment names."""
    settings = load_settings(LaunchSettings)
    place, redis = suite.keys or settings.keys, suite.redis or settings.redis
    return open_keys(place, redis=redis, cluster=suite.cluster or settings.cluster)
