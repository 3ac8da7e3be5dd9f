"""Who may call a gRPC listener, and where the suite's token may travel. Pure.

Loopback is trusted as far as the machine's users are: only admin verbs need the token there. Beyond it every caller
shows a certificate (mutual TLS) or, where a setting accepts that it can be read on its way, the token.
"""

from ipaddress import ip_address

from libs.contracts.errors import StartupError
from libs.runtime.settings import CommonSettings

Metadata = tuple[tuple[str, str], ...]
"""Of a call, as gRPC takes it."""

AUTHORIZATION = "authorization"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Answered to anybody: a probe has no secret, and learns no more than that the process serves."""
ADMIN_SERVICE = "AdminService/"
TLS_VARIABLES = "FULCRUM_TLS_CERT, FULCRUM_TLS_KEY and FULCRUM_TLS_CA"
PLAINTEXT_VARIABLE = "FULCRUM_ALLOW_PLAINTEXT_TOKEN=1"


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


def check_listener(settings: CommonSettings, address: str) -> None:
    """Raises StartupError for a listener beyond loopback that strangers could call."""
    if settings.tls_cert or is_loopback(address):
        return
    if not (settings.token.get_secret_value() and settings.allow_plaintext_token):
        raise StartupError(
            f"anybody could call gRPC on {address.rpartition(':')[0]}: set {TLS_VARIABLES}, or FULCRUM_TOKEN with"
            f" {PLAINTEXT_VARIABLE} on a network that you trust, or FULCRUM_HOST=127.0.0.1"
        )


def needs_token(settings: CommonSettings, address: str, method: str) -> bool:
    """Whether a call of `method` on a listener at `address` must bring the token."""
    if ADMIN_SERVICE in method:
        return True
    certified = bool(settings.tls_cert)  # TLS showed the caller's certificate already
    return not (certified or is_loopback(address) or method.startswith(OPEN_SERVICES))


def call_metadata(settings: CommonSettings, address: str) -> Metadata:
    """What a call to `address` brings: the token, except where it would be readable on its way."""
    return bearer(settings.token.get_secret_value()) if _hidden(settings, address) else ()


def admin_token(settings: CommonSettings, address: str, suite_token: str = "") -> str:
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


def _hidden(settings: CommonSettings, address: str) -> bool:
    return bool(settings.tls_cert) or settings.allow_plaintext_token or is_loopback(address)
