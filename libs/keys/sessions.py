"""Browser sessions: a random cookie in place of a key, which is then stored on no disk."""

import secrets
from typing import Final

from libs.keys.book import digest_of

COOKIE: Final = "fulcrum_session"
MAX_SESSIONS: Final = 1_000
"""The most sessions; one more ends the oldest."""
SESSION_S: Final = 12 * 3600
"""The seconds from a login to the next."""
TOKEN_BYTES: Final = 32


class Sessions:
    """The sessions of one process, which end with it and with the key they stand for."""

    def __init__(self) -> None:
        # By the cookie's digest: the key's digest and the end of the session.
        self._keys: dict[bytes, tuple[bytes, float]] = {}

    def begin(self, key: bytes, now_s: float) -> str:
        """Begin a session for a key's holder and return the value of its cookie."""
        while len(self._keys) >= MAX_SESSIONS:
            del self._keys[next(iter(self._keys))]
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._keys[digest_of(token.encode())] = digest_of(key), now_s + SESSION_S
        return token

    def digest(self, cookies: bytes, now_s: float) -> bytes | None:
        """Return the digest of the key that the session of a request stands for; None without a session."""
        token = _token(cookies)
        found = self._keys.get(digest_of(token)) if token else None
        return found[0] if found is not None and now_s < found[1] else None

    def end(self, cookies: bytes) -> None:
        self._keys.pop(digest_of(_token(cookies)), None)


def _token(cookies: bytes) -> bytes:
    for each in cookies.split(b";"):
        name, _, value = each.strip().partition(b"=")
        if name == COOKIE.encode():
            return value
    return b""
