"""Authentication of Kafka clients and encryption of their connections (TLS, SASL), by the settings of every service."""

import ssl
from dataclasses import dataclass
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.runtime.settings import CommonSettings


@dataclass(frozen=True, slots=True)
class SecuredBrokers:
    """Brokers that require TLS, authentication, or both."""

    servers: str
    """The brokers' addresses in the form HOST:PORT[,HOST:PORT...]."""
    protocol: str
    """Kafka's name of the protocol: SSL, SASL_PLAINTEXT or SASL_SSL."""
    mechanism: str = ""
    user: str = ""
    password: str = ""
    context: ssl.SSLContext | None = None


Brokers = str | SecuredBrokers
"""Secured brokers, or HOST:PORT[,HOST:PORT...] of plaintext ones."""

PLAINTEXT: Final = "PLAINTEXT"


def brokers_of(settings: CommonSettings) -> Brokers:
    """Return the brokers of the settings. Raises StartupError for unreadable files."""
    protocol = settings.kafka_protocol
    if protocol == PLAINTEXT:
        return settings.kafka
    sasl = protocol.startswith("SASL")
    return SecuredBrokers(
        settings.kafka,
        protocol,
        mechanism=settings.kafka_mechanism if sasl else "",
        user=settings.kafka_user if sasl else "",
        password=settings.kafka_password.get_secret_value() if sasl else "",
        context=_context(settings) if protocol.endswith("SSL") else None,
    )


def client_options(brokers: Brokers) -> dict[str, Any]:
    """Return the arguments that every aiokafka client needs."""
    if isinstance(brokers, str):
        return {"bootstrap_servers": brokers}
    options: dict[str, Any] = {"bootstrap_servers": brokers.servers, "security_protocol": brokers.protocol}
    if brokers.context is not None:
        options["ssl_context"] = brokers.context
    if brokers.mechanism:
        options |= {
            "sasl_mechanism": brokers.mechanism,
            "sasl_plain_username": brokers.user,
            "sasl_plain_password": brokers.password,
        }
    return options


def _context(settings: CommonSettings) -> ssl.SSLContext:
    """Return a context that verifies the broker's certificate and name, and presents ours if there is one."""
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ca or None)
        if settings.kafka_cert:
            context.load_cert_chain(settings.kafka_cert, settings.kafka_key or None)
    except OSError as error:  # this includes ssl's own errors
        raise StartupError(
            f"FULCRUM_KAFKA_CA, _CERT or _KEY cannot be read as PEM files: {error.strerror or error}"
        ) from None
    return context
