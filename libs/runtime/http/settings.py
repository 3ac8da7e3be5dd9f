"""Settings that every service with an HTTP port has."""

from ipaddress import IPv4Network, ip_network
from typing import Annotated

from pydantic import AfterValidator, Field

from libs.runtime.http.bounds import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, ConnectionGuard, HttpBounds
from libs.runtime.net.sockets import max_open_files
from libs.runtime.settings import CommonSettings


def _networks(text: str) -> str:
    """Return the networks that a setting names, IPv4 ones as a socket of IPv6 shows them too. Raises ValueError."""
    found: list[str] = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        network = ip_network(each)
        found.append(str(network))
        if isinstance(network, IPv4Network):
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return ",".join(found)


class HttpSettings(CommonSettings):
    """Who may call, and bounds on connections."""

    keys: str = Field("", validation_alias="FULCRUM_KEYS")
    """Where hashes of API keys are: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster. From the first key on every request needs one."""
    http_hosts: str = Field("", validation_alias="FULCRUM_HTTP_HOSTS")
    """Host names, separated by commas, that HTTP on loopback answers to beside loopback's own while there is no key;
    web pages of other names could ask it otherwise."""

    http_trusted_proxies: Annotated[str, AfterValidator(_networks)] = Field(
        "", validation_alias="FULCRUM_HTTP_TRUSTED_PROXIES"
    )
    """Addresses and networks of proxies before this service, separated by commas, such as 127.0.0.1, 10.0.0.0/8: their
    x-forwarded-proto says whether clients came by HTTPS, by which the page's session is kept to HTTPS. Nobody else's
    does."""
    http_max_connections: int = Field(MAX_CONNECTIONS, ge=1, validation_alias="FULCRUM_HTTP_MAX_CONNECTIONS")
    """HTTP connections that may be open, or half as many as the process may open files if that is less; more are
    refused with 503."""
    http_max_connections_per_address: int = Field(
        MAX_CONNECTIONS_PER_ADDRESS, ge=1, validation_alias="FULCRUM_HTTP_MAX_CONNECTIONS_PER_ADDRESS"
    )
    """Connections that may be open from one address: as many as all where clients come through a proxy."""

    def http_guard(self) -> ConnectionGuard:
        """For one server. The other half of the open files is for workers, stores and clients' files."""
        most = min(self.http_max_connections, max(max_open_files() // 2, 1))
        per_address = min(self.http_max_connections_per_address, most)
        bounds = HttpBounds(max_connections=most, max_connections_per_address=per_address)
        return ConnectionGuard(bounds, proxies=tuple(filter(None, self.http_trusted_proxies.split(","))))
