"""The hosts from which images may be fetched, and the IP addresses to which their names may resolve. Pure."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Self

from httpx import URL, InvalidURL

SETTING: Final = "FULCRUM_GATEWAY_IMAGE_HOSTS"
MAX_URL_CHARS: Final = 8192
_PORTS: Final = {"http": 80, "https": 443}
_NAME: Final = re.compile(r"[a-z0-9._-]+")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")


class RefusedUrl(Exception):
    """An error for a URL that may not be fetched. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ImageHosts:
    """An allow-list of hosts. Without entries, nothing is fetched."""

    names: frozenset[tuple[str, int | None]] = frozenset()
    """Hosts and their ports. A port of None stands for the default port of http and https."""
    addresses: frozenset[IPv4Address | IPv6Address] = frozenset()
    """The IP addresses among `names`. Host names may resolve to them even if they are private."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks whose addresses are allowed as hosts and as targets of host names, even if they are private."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a comma-separated list of host names, addresses and networks.

        Raise ValueError, which names the faulty entry.
        """
        entries = [entry for entry in map(str.strip, text.split(",")) if entry]
        names = [_authority(entry) for entry in entries if "/" not in entry]
        addresses = [address for host, _ in names if (address := _literal(host)) is not None]
        networks = [_network(entry) for entry in entries if "/" in entry]
        return cls(frozenset(names), frozenset(addresses), tuple(networks))

    def check(self, url: URL) -> None:
        """Raise RefusedUrl if the URL's host and port are not in the list."""
        host, port = host_of(url), port_of(url)
        if not self.names and not self.networks:
            raise RefusedUrl(f"images are fetched only from hosts in {SETTING} of the gateway, and it names none")
        if url.userinfo:
            raise RefusedUrl("addresses with a user or password are not fetched")
        default = port == _PORTS[url.scheme]
        if (host, port) in self.names or (default and (host, None) in self.names):
            return
        address = _literal(host)
        if default and address is not None and any(address in network for network in self.networks):
            return
        shown = url.netloc.decode("ascii")
        raise RefusedUrl(f"images are fetched only from hosts in {SETTING} of the gateway, and {shown} is none of them")

    def allows_target(self, address: str) -> bool:
        """Return whether host names may resolve to `address`, which must be public or in the list.

        If an IPv6 address embeds an IPv4 address, the embedded one must be public or in the list.
        """
        found = ip_address(address)
        if self._lists(found):
            return True
        inner = _inner(found)
        if inner is not None:
            return self._lists(inner) or _is_public(inner)
        return _is_public(found)

    def _lists(self, address: IPv4Address | IPv6Address) -> bool:
        return address in self.addresses or any(address in network for network in self.networks)


def read_url(text: str) -> URL:
    """Parse an image's URL. Raise RefusedUrl if its scheme is neither http nor https."""
    if len(text) > MAX_URL_CHARS:
        raise RefusedUrl(f"the address is over {MAX_URL_CHARS} characters")
    try:
        url = URL(text)
    except (InvalidURL, ValueError) as error:
        raise RefusedUrl(f"the address cannot be read: {error}") from None
    if url.scheme not in _PORTS or not url.raw_host:
        raise RefusedUrl("only addresses with http:// or https:// and a host are fetched")
    return url.copy_with(fragment=None)


def host_of(url: URL) -> str:
    return url.raw_host.decode("ascii")


def port_of(url: URL) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


def _network(entry: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(entry)
    except ValueError as error:
        raise ValueError(f"{entry!r} is not a network such as 10.0.0.0/8: {error}") from None


def _authority(entry: str) -> tuple[str, int | None]:
    """Return the host in an entry, normalised as in URLs, and its port."""
    if entry.count(":") > 1 and not entry.startswith("["):
        entry = f"[{entry}]"
    try:
        url = URL(f"any://{entry}")
    except (InvalidURL, ValueError) as error:
        raise ValueError(f"{entry!r} is not a host: {error}") from None
    host = host_of(url)
    if url.userinfo or url.query or url.fragment or not (_NAME.fullmatch(host) or _literal(host)):
        raise ValueError(
            f"{entry!r} is not a host: write a name or an address, with :port where it is not the usual one"
        )
    return host, url.port


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address embedded in an IPv4-mapped, NAT64 or 6to4 address, or None if there is none."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    # Python considers some addresses outside this network global that lead to private hosts, such as those of
    # fec0::/10.
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast
