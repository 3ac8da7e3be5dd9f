"""Settings that every service with an HTTP port has."""

from pydantic import Field

from libs.runtime.http.bounds import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, ConnectionGuard, HttpBounds
from libs.runtime.net.sockets import max_open_files
from libs.runtime.settings import CommonSettings


class HttpSettings(CommonSettings):
    """Who may call, and bounds on connections."""

    keys: str = Field("", validation_alias="FULCRUM_KEYS")
    """Where hashes of API keys are: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster. From the first key on every request needs one."""
    http_hosts: str = Field("", validation_alias="FULCRUM_HTTP_HOSTS")
    """Host names, separated by commas, that HTTP on loopback answers to beside loopback's own while there is no key;
    web pages of other names could ask it otherwise."""

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
        return ConnectionGuard(HttpBounds(max_connections=most, max_connections_per_address=per_address))
