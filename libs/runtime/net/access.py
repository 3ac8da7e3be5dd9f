"""The callers that a gRPC listener accepts, and the addresses to which the suite's token may be sent. Pure.

Loopback is trusted as far as the machine's users are: only admin verbs need the token there. Beyond it every caller
shows a certificate (mutual TLS) or, if a setting accepts that it can be read in transit, the token. Certificates of
`fulcrum tls` name a role, and each role may make its service's calls only: a gateway sets no roles, a worker
submits nothing.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Final, Literal, NamedTuple, Protocol, get_args

from libs.contracts.errors import PermissionDenied, StartupError

Metadata = tuple[tuple[str, str], ...]
"""Metadata of a call in gRPC's form."""

AUTHORIZATION = "authorization"
# Open to every caller: a probe has no secret, and learns only that the process serves.
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
ADMIN_SERVICE = "AdminService/"
CertificateRole = Literal["gateway", "worker", "planner", "metrics", "operator"]
"""The roles that certificates name; an operator is a person with the command line."""
CERTIFICATE_ROLES: Final[tuple[CertificateRole, ...]] = get_args(CertificateRole)
_CALLS: Final[Mapping[str, frozenset[str]]] = {
    "WorkerService/": frozenset({"gateway"}),
    "KvService/": frozenset({"worker"}),
    ADMIN_SERVICE: frozenset({"planner", "operator"}),
}
_ROLE_URI: Final = re.compile(r"spiffe://([a-z0-9][a-z0-9-]{0,31})\.fulcrum/([a-z]+)")
TLS_VARIABLES = "FULCRUM_TLS_CERT, FULCRUM_TLS_KEY and FULCRUM_TLS_CA"
PLAINTEXT_VARIABLE = "FULCRUM_ALLOW_PLAINTEXT_TOKEN=1"


class Secret(Protocol):
    """A secret value that is not shown when printed."""

    def get_secret_value(self) -> str: ...


class CallSettings(Protocol):
    """The part of `CommonSettings` that calls between processes need."""

    @property
    def cluster(self) -> str: ...

    @property
    def token(self) -> Secret:
        """The suite's token; empty if there is none."""
        ...

    @property
    def allow_plaintext_token(self) -> bool:
        """Return whether the token may be sent where it can be read in transit."""
        ...

    @property
    def tls_cert(self) -> str:
        """The path of the certificate; empty without TLS."""
        ...

    @property
    def tls_key(self) -> str: ...

    @property
    def tls_ca(self) -> str: ...


def bearer(token: str) -> Metadata:
    """Return the token as metadata; empty without a token."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def is_loopback(address: str) -> bool:
    """Return whether only this machine's processes reach `host:port`, `[host]:port` or `unix:path`."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # another name: where it leads is the resolver's to say
        return False


def check_listener(settings: CallSettings, address: str) -> None:
    """Raise StartupError for a listener beyond loopback that strangers could call."""
    if settings.tls_cert or is_loopback(address):
        return
    if not (settings.token.get_secret_value() and settings.allow_plaintext_token):
        raise StartupError(
            f"anybody could call gRPC on {address.rpartition(':')[0]}: set {TLS_VARIABLES}, or FULCRUM_TOKEN with"
            f" {PLAINTEXT_VARIABLE} on a network that you trust, or FULCRUM_HOST=127.0.0.1"
        )


def needs_token(settings: CallSettings, address: str, method: str) -> bool:
    """Return whether a call of `method` on a listener at `address` must carry the token."""
    if ADMIN_SERVICE in method:
        return True
    certified = bool(settings.tls_cert)  # TLS showed the caller's certificate already
    return not (certified or is_loopback(address) or method.startswith(OPEN_SERVICES))


def call_metadata(settings: CallSettings, address: str) -> Metadata:
    """Return the metadata of calls to `address`: the token, unless it could be read in transit."""
    return bearer(settings.token.get_secret_value()) if _hidden(settings, address) else ()


def admin_token(settings: CallSettings, address: str, suite_token: str = "") -> str:
    """Return the token for admin verbs at `address`, preferring the suite's own to that of the environment.

    Raise StartupError if it could be read in transit.
    """
    token = suite_token or settings.token.get_secret_value()
    if token and not _hidden(settings, address):
        raise StartupError(
            f"the token would travel to {address} in plaintext: set {TLS_VARIABLES}, or {PLAINTEXT_VARIABLE} on a"
            " network that you trust"
        )
    return token


def _hidden(settings: CallSettings, address: str) -> bool:
    return bool(settings.tls_cert) or settings.allow_plaintext_token or is_loopback(address)


class CertifiedPeer(NamedTuple):
    """The cluster and role that a certificate names."""

    cluster: str
    role: str


def role_uri(cluster: str, role: CertificateRole) -> str:
    """Return the URI by which a certificate names its holder's role."""
    return f"spiffe://{cluster}.fulcrum/{role}"


def certified(uris: Iterable[str]) -> CertifiedPeer | None:
    """Return the first role among a certificate's URIs, or None if its authority assigns no roles."""
    found = (_ROLE_URI.fullmatch(each) for each in uris)
    return next((CertifiedPeer(each[1], each[2]) for each in found if each), None)


def check_peer(own: CertifiedPeer | None, peer: CertifiedPeer | None, method: str) -> None:
    """Raise PermissionDenied if the peer's role may not call `method`, or belongs to another cluster.

    If this process's own certificate names no role, its authority assigns none, and any certificate is accepted.
    """
    if own is None or method.startswith(OPEN_SERVICES):
        return
    if peer is None or peer.cluster != own.cluster:
        raise PermissionDenied(f"the caller's certificate names no role in cluster {own.cluster}")
    allowed = next((roles for service, roles in _CALLS.items() if service in method), frozenset[str]())
    if peer.role not in allowed:
        raise PermissionDenied(f"a certificate of role {peer.role} may not call {method}")
