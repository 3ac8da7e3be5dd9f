"""The stores of keys: Redis, or a file on one machine.

The file is replaced atomically, and only its owner may read it.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from libs.contracts.errors import StoreUnavailable
from libs.keys.book import KeySet, KeyStore, StoredKeySet, read_book
from libs.runtime.paths import cache_dir, create_private, private_folder

ABSENT: Final = "absent"
"""The version of keys that were never stored."""
_WRITABLE_TO_OTHERS: Final = 0o022


class FileKeys:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def load(self, known: str = "") -> StoredKeySet | None:
        # If nothing has changed, this needs one fstat.
        return await asyncio.to_thread(self._load, known)

    async def change(self, edit: Callable[[KeySet], KeySet]) -> KeySet:
        """Change the keys under a file lock, which excludes other processes on this machine."""
        return await asyncio.to_thread(self._change, edit)

    async def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _load(self, known: str) -> StoredKeySet | None:
        with self._errors():
            try:
                with self._path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    version = f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"
                    if version == known:
                        return None
                    if found.st_mode & _WRITABLE_TO_OTHERS:
                        raise StoreUnavailable(
                            f"the keys in {self._path} can be written by other users: chmod 600 {self._path}"
                        )
                    return StoredKeySet(version, read_book(file.read()))
            except FileNotFoundError:
                return None if known == ABSENT else StoredKeySet(ABSENT, KeySet())

    def _change(self, edit: Callable[[KeySet], KeySet]) -> KeySet:
        with self._errors():
            private_folder(self._path.parent)
            lock = self._path.with_name(f"{self._path.name}.lock")
            with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                before = self._load("")
                assert before is not None
                book = edit(before.book)
                self._write(book)
                return book

    def _write(self, book: KeySet) -> None:
        part = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            with create_private(part) as file:
                file.write(msgspec.json.format(msgspec.json.encode(book)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"the keys in {self._path} cannot be used ({error.strerror})") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreUnavailable(f"the keys in {self._path} cannot be read ({error})") from error


IN_REDIS: Final = "redis"


def keys_place(place: str, cluster: str) -> str:
    """Return the location of the keys: `redis`, or the path of a file."""
    return place or str(cache_dir() / "keys" / f"{cluster}.json")


def open_keys(place: str, *, redis: str, cluster: str) -> KeyStore:
    """Return the key store for a value of FULCRUM_KEYS."""
    if place == IN_REDIS:
        from libs.keys.redis import RedisKeys  # noqa: PLC0415 (0.1 s, which most commands need not wait for)

        return RedisKeys(redis, cluster)
    return FileKeys(Path(keys_place(place, cluster)).expanduser())
