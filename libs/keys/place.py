from pathlib import Path
from typing import Final

from libs.keys.file import FileKeys
from libs.keys.port import KeyStore
from libs.runtime.paths import cache_dir

IN_REDIS: Final = "redis"


def keys_place(place: str, cluster: str) -> str:
    """Return where the keys are by the setting: `redis`, or the path of a file."""
    return place or str(cache_dir() / "keys" / f"{cluster}.json")


def open_keys(place: str, *, redis: str, cluster: str) -> KeyStore:
    """Return the store at `place`, a value of FULCRUM_KEYS."""
    if place == IN_REDIS:
        from libs.keys.redis import RedisKeys  # noqa: PLC0415 (0.1 s, which most commands need not wait for)

        return RedisKeys(redis, cluster)
    return FileKeys(Path(keys_place(place, cluster)).expanduser())
