"""Host names that a service on loopback answers to.

Without this check a web page could make its own name resolve to 127.0.0.1 and send requests that only this
machine's processes may send (DNS rebinding).
"""

from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from libs.contracts.errors import WrongHost, quoted
from libs.runtime.http.settings import HttpSettings
from libs.runtime.net.access import is_loopback

VARIABLE: Final = "FULCRUM_HTTP_HOSTS"
MAX_REMEMBERED: Final = 256
"""The most cached verdicts on hosts and origins."""


def own_hosts(settings: HttpSettings) -> "HostCheck | None":
    """Return the check for a listener on loopback or with configured names; None if any name is its own."""
    if is_loopback(f"{settings.host}:0") or settings.http_hosts:
        return HostCheck(settings.http_hosts)
    return None


class HostCheck:
    """A check for the names of loopback and of the setting."""

    def __init__(self, names: str) -> None:
        """Accept `names`, a comma-separated list without ports, beside those of loopback."""
        self._names = frozenset(filter(None, (name.strip().lower() for name in names.split(","))))
        self._wrong = lru_cache(MAX_REMEMBERED)(self._find_wrong)

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raise WrongHost for a foreign host or origin. A client that sends no Host is no browser and passes."""
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
