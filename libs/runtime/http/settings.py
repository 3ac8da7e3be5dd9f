"""Bounds on what HTTP clients may send and hold open, and the settings that every HTTP service has."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from typing import Annotated

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import AfterValidator, Field

from libs.contracts import metric_names as names
from libs.contracts.errors import FulcrumError, TooManyConnections
from libs.runtime.net.ports import max_open_files
from libs.runtime.settings import CommonSettings

MAX_CONNECTIONS = 8192
MAX_CONNECTIONS_PER_ADDRESS = 4096
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Limits on every connection of one server. Times are precise to a second."""

    max_connections: int = MAX_CONNECTIONS
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    max_line_bytes: int = 16 * 1024
    """Bytes of the request's target, and of each header."""
    max_head_bytes: int = 64 * 1024
    """Bytes of all headers together, and of input that does not advance the request, such as trailers or chunk
    extensions.
    """
    max_pipelined: int = 16
    """Requests on a connection that wait for the response to an earlier one."""
    head_s: float = 10.0
    """Time from a connection's start, or a request's first byte, to the end of its headers."""
    body_s: float = 60.0
    """Time between two parts of a body. Routes may bound the whole body more strictly."""
    idle_s: float = 75.0
    """Time between a response and the next request."""
    linger_s: float = 2.0
    """The time for which further input of a refused client is discarded. Closing at once would destroy the response in
    transit (RFC 9112, 9.6).
    """


class ConnectionGuard(Collector):
    """Counts the connections of a server by address, and refuses those over a bound."""

    def __init__(self, bounds: HttpBounds | None = None, *, proxies: Sequence[str] = ()) -> None:
        """`proxies` names the networks of proxies whose x-forwarded-proto is trusted."""
        self.bounds = bounds or HttpBounds()
        self.proxies = proxies
        self._open: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self.on_refusal: Callable[[FulcrumError], None] = lambda _: None
        """Called with each error that `count_refusal` counts."""
        self.error_body: Callable[[FulcrumError, str], object] = lambda error, _: error.http_body
        """Returns the body of a refusal by its error and the path of the request, which is empty before a head."""

    def enter(self, address: str) -> FulcrumError | None:
        """Count a connection and return the error to refuse it with if it is one too many. Either way it must
        `leave`.
        """
        self._open[address] += 1
        if self._open.total() > self.bounds.max_connections:
            return TooManyConnections(
                f"{self.bounds.max_connections} connections are open already", retry_after_s=RETRY_AFTER_S
            )
        if self._open[address] > self.bounds.max_connections_per_address:
            message = f"{self.bounds.max_connections_per_address} connections from {address} are open already"
            return TooManyConnections(message, retry_after_s=RETRY_AFTER_S)
        return None

    def leave(self, address: str) -> None:
        """Record the end of a counted connection."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def count_refusal(self, error: FulcrumError) -> None:
        """Count a request or connection that was refused before any route saw it."""
        self._refused[error.code] += 1
        self.on_refusal(error)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(names.HTTP_CONNECTIONS, "Open HTTP connections.", self._open.total())
        refused = CounterMetricFamily(
            names.HTTP_REFUSED_TOTAL, "Requests and connections refused before any route.", labels=["code"]
        )
        for code, count in self._refused.items():
            refused.add_metric([code], count)
        yield refused


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
    """Store of the hashes of API keys: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster. Once a key exists, every request needs one.
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
