from ipaddress import IPv4Network, ip_network
from typing import Annotated

from pydantic import AfterValidator, Field

from libs.runtime.http.bounds import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, ConnectionGuard, HttpBounds
from libs.runtime.net.sockets import max_open_files
from libs.runtime.settings import CommonSettings


def _networks(text: str) -> str:
    """Validate a list of networks and return it with IPv4-mapped IPv6 forms, as dual-stack sockets show them. Raise
    ValueError.
    """
    found: list[str] = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        network = ip_network(each)
        found.append(str(network))
        if isinstance(network, IPv4Network):
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return ",".join(found)


class HttpSettings(CommonSettings):
    """Settings of every service with an HTTP port: who may call, and bounds on connections."""

    keys: str = Field("", validation_alias="FULCRUM_KEYS")
    """Where hashes of API keys are: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster. From the first key on every request needs one.
    """
    http_hosts: str = Field("", validation_alias="FULCRUM_HTTP_HOSTS")
    """Host names, separated by commas, that HTTP on loopback answers to beside loopback's own while there is no key;
    otherwise web pages of other names could send it requests.
    """

    http_trusted_proxies: Annotated[str, AfterValidator(_networks)] = Field(
        "", validation_alias="FULCRUM_HTTP_TRUSTED_PROXIES"
    )
    """Addresses and networks of proxies in front of this service, separated by commas, such as 127.0.0.1, 10.0.0.0/8.
    Only their x-forwarded-proto is trusted to say whether clients came by HTTPS, in which case the page's session
    is kept to HTTPS.
    """
    http_max_connections: int = Field(MAX_CONNECTIONS, ge=1, validation_alias="FULCRUM_HTTP_MAX_CONNECTIONS")
    """HTTP connections that may be open, or half as many as the process may open files if that is less; more are
    refused with 503.
    """
    http_max_connections_per_address: int = Field(
        MAX_CONNECTIONS_PER_ADDRESS, ge=1, validation_alias="FULCRUM_HTTP_MAX_CONNECTIONS_PER_ADDRESS"
    )
    """Connections that may be open from one address. Set it to the total if clients come through a proxy."""

    def http_guard(self) -> ConnectionGuard:
        """Return the guard of one server, which may use half of the open files; the rest is for workers, stores and
        clients' files.
        """
        most = min(self.http_max_connections, max(max_open_files() // 2, 1))
        per_address = min(self.http_max_connections_per_address, most)
        bounds = HttpBounds(max_connections=most, max_connections_per_address=per_address)
        return ConnectionGuard(bounds, proxies=tuple(filter(None, self.http_trusted_proxies.split(","))))
