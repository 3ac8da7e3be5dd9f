"""Who may call a gRPC listener, and where the suite's token may travel. Pure.

Loopback is trusted as far as the machine's users are: only admin verbs need the token there. Beyond it every caller
shows a certificate (mutual TLS) or, where a setting accepts that it can be read on its way, the token. Certificates of
`fulcrum tls` name a role, and each role has the calls that its service makes: a gateway sets no roles, a worker submits
nothing.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Final, Literal, NamedTuple, Protocol, get_args

from libs.contracts.errors import PermissionDenied, StartupError

Metadata = tuple[tuple[str, str], ...]
"""Metadata of a call, as gRPC takes it."""

AUTHORIZATION = "authorization"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Answered to anybody: a probe has no secret, and learns no more than that the process serves."""
ADMIN_SERVICE = "AdminService/"
CertificateRole = Literal["gateway", "worker", "planner", "metrics", "operator"]
"""operator: a person with the command line."""
CERTIFICATE_ROLES: Final[tuple[CertificateRole, ...]] = get_args(CertificateRole)
_CALLS: Final[Mapping[str, frozenset[str]]] = {
    "WorkerService/": frozenset({"gateway"}),
    "KvService/": frozenset({"worker"}),
    ADMIN_SERVICE: frozenset({"planner", "operator"}),
}
"""Which roles call which service."""
_ROLE_URI: Final = re.compile(r"spiffe://([a-z0-9][a-z0-9-]{0,31})\.fulcrum/([a-z]+)")
TLS_VARIABLES = "FULCRUM_TLS_CERT, FULCRUM_TLS_KEY and FULCRUM_TLS_CA"
PLAINTEXT_VARIABLE = "FULCRUM_ALLOW_PLAINTEXT_TOKEN=1"


class Secret(Protocol):
    """A value that does not print."""

    def get_secret_value(self) -> str:
        """It."""
        ...


class CallSettings(Protocol):
    """What calls between processes need of `CommonSettings`."""

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        ...

    @property
    def token(self) -> Secret:
        """The suite's; empty: none."""
        ...

    @property
    def allow_plaintext_token(self) -> bool:
        """Whether the token may be read on its way."""
        ...

    @property
    def tls_cert(self) -> str:
        """File; empty: no TLS."""
        ...

    @property
    def tls_key(self) -> str:
        """File."""
        ...

    @property
    def tls_ca(self) -> str:
        """File."""
        ...


def bearer(token: str) -> Metadata:
    """The token as metadata; empty without one."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def is_loopback(address: str) -> bool:
    """Whether only this machine's processes reach `host:port`, `[host]:port` or `unix:path`."""
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
    """Raises StartupError for a listener beyond loopback that strangers could call."""
    if settings.tls_cert or is_loopback(address):
        return
    if not (settings.token.get_secret_value() and settings.allow_plaintext_token):
        raise StartupError(
            f"anybody could call gRPC on {address.rpartition(':')[0]}: set {TLS_VARIABLES}, or FULCRUM_TOKEN with"
            f" {PLAINTEXT_VARIABLE} on a network that you trust, or FULCRUM_HOST=127.0.0.1"
        )


def needs_token(settings: CallSettings, address: str, method: str) -> bool:
    """Whether a call of `method` on a listener at `address` must bring the token."""
    if ADMIN_SERVICE in method:
        return True
    certified = bool(settings.tls_cert)  # TLS showed the caller's certificate already
    return not (certified or is_loopback(address) or method.startswith(OPEN_SERVICES))


def call_metadata(settings: CallSettings, address: str) -> Metadata:
    """What a call to `address` brings: the token, except where it would be readable on its way."""
    return bearer(settings.token.get_secret_value()) if _hidden(settings, address) else ()


def admin_token(settings: CallSettings, address: str, suite_token: str = "") -> str:
    """The token for admin verbs at `address`, the suite's own before that of the environment.

    Raises StartupError where it would be readable on its way.
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
    """Who a certificate says its holder is."""

    cluster: str
    role: str


def role_uri(cluster: str, role: CertificateRole) -> str:
    """What a certificate names its holder's role by."""
    return f"spiffe://{cluster}.fulcrum/{role}"


def certified(uris: Iterable[str]) -> CertifiedPeer | None:
    """The first role that is among a certificate's names; None for one of an authority that gives out none."""
    found = (_ROLE_URI.fullmatch(each) for each in uris)
    return next((CertifiedPeer(each[1], each[2]) for each in found if each), None)


def check_peer(own: CertifiedPeer | None, peer: CertifiedPeer | None, method: str) -> None:
    """Raises PermissionDenied where the peer's role does not make such calls, or is another cluster's. A process whose
    own certificate names no role has an authority that gives out none: there any certificate will do."""
    if own is None or method.startswith(OPEN_SERVICES):
        return
    if peer is None or peer.cluster != own.cluster:
        raise PermissionDenied(f"the caller's certificate names no role in cluster {own.cluster}")
    allowed = next((roles for service, roles in _CALLS.items() if service in method), frozenset[str]())
    if peer.role not in allowed:
        raise PermissionDenied(f"a certificate of role {peer.role} may not call {method}")
