"""Names that a service on loopback answers to. Without this a web page could have its own name resolve to 127.0.0.1,
and ask what only this machine's processes may (DNS rebinding). Pure."""

from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from libs.contracts.errors import quoted
from libs.contracts.http_errors import WrongHost
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import is_loopback

VARIABLE: Final = "FULCRUM_HTTP_HOSTS"
MAX_REMEMBERED: Final = 256
"""Verdicts on hosts and origins; others are found again."""


def own_hosts(settings: HttpSettings) -> "HostCheck | None":
    """For a listener on loopback, and for one whose names the setting gives; None: any name is its own."""
    if is_loopback(f"{settings.host}:0") or settings.http_hosts:
        return HostCheck(settings.http_hosts)
    return None


class HostCheck:
    """Loopback's names, and those of the setting."""

    def __init__(self, names: str) -> None:
        """`names`: comma-separated, without ports."""
        self._names = frozenset(filter(None, (name.strip().lower() for name in names.split(","))))
        self._wrong = lru_cache(MAX_REMEMBERED)(self._find_wrong)

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raises WrongHost. What sends no Host is no browser."""
        wrong = self._wrong(host, origin)
        if wrong:
            raise WrongHost(wrong)

    def _find_wrong(self, host: bytes | None, origin: bytes | None) -> str:
        if host and not self._is_own(f"//{host.decode('latin-1')}"):
            asked = quoted(host.decode("latin-1"))
            return f"this service does not answer to {asked}: {VARIABLE} names what it answers to beside loopback"
        if origin and not self._is_own(origin.decode("latin-1")):
            asked = quoted(origin.decode("latin-1"))
            return f"pages of {asked} may not ask this service: {VARIABLE} adds names that may"
        return ""

    def _is_own(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname
        except ValueError:
            return False
        if not name:
            return False
        return name in self._names or name.endswith(".localhost") or is_loopback(f"{name}:0")
