"""Sessions of people in a browser: a random cookie in place of their key, which stays on no disk. No I/O."""

import secrets
from typing import Final

from libs.keys.book import digest_of

COOKIE: Final = "fulcrum_session"
MAX_SESSIONS: Final = 1_000
"""The oldest ends where there is one more."""
SESSION_S: Final = 12 * 3600
"""From a login to the next."""
TOKEN_BYTES: Final = 32


class Sessions:
    """Sessions of one process; they end with it, and with the key that they stand for."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[bytes, float]] = {}
        """By the cookie's digest: the key's digest, and when the session ends."""

    def begin(self, key: bytes, now_s: float) -> str:
        """A session of a key's holder; its cookie's value."""
        while len(self._keys) >= MAX_SESSIONS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._keys[digest_of(token.encode())] = digest_of(key), now_s + SESSION_S
        return token

    def digest(self, cookies: bytes, now_s: float) -> bytes | None:
        """The digest of the key that a request's session stands for; None without one."""
        token = _token(cookies)
        found = self._keys.get(digest_of(token)) if token else None
        return found[0] if found is not None and now_s < found[1] else None

    def end(self, cookies: bytes) -> None:
        """The session of a request is over."""
        self._keys.pop(digest_of(_token(cookies)), None)


def _token(cookies: bytes) -> bytes:
    for each in cookies.split(b";"):
        name, _, value = each.strip().partition(b"=")
        if name == COOKIE.encode():
            return value
    return b""
