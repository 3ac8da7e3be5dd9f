"""TLS credentials of gRPC listeners and channels, read from files that may be replaced while services run."""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PrivateKeyTypes

from libs.contracts.errors import StartupError
from libs.runtime.net.access import CallSettings, CertifiedPeer, certified
from libs.runtime.net.authority import held_uris

log = structlog.get_logger()

# How often mismatched files are read again at a start, since they may be in the middle of being replaced.
MAX_READS: Final = 10
READ_AGAIN_S: Final = 0.01
# Sets of certificate files that one process uses.
MOST_FILES: Final = 16


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process's key and certificate, and the authority that it trusts; PEM."""

    key: bytes
    cert: bytes
    authority: bytes


class _Unfit(StartupError):
    """Raised for files that exist and do not match yet."""


class CredentialFiles:
    """The credential files of a process, which may be replaced one by one or written in place."""

    def __init__(self, cert: str, key: str, authority: str) -> None:
        """The paths of certificate and key may be equal."""
        self.cert, self.key, self.authority = cert, key, authority
        self._last: Credentials | None = None

    def read(self) -> Credentials:
        """Return the certificate with its key, and the authority.

        While the files do not match or cannot be read, return the last ones that did. Raise StartupError if there
        are none.
        """
        tries = MAX_READS if self._last is None else 1
        for attempt in range(tries):
            if attempt:
                time.sleep(READ_AGAIN_S)
            try:
                self._last = self._contents()
            except StartupError as error:
                problem = error
                if not isinstance(error, _Unfit):
                    break
            else:
                return self._last
        if self._last is None:
            raise problem
        log.warning("certificates cannot be read: the last ones stay", error=problem.message)
        return self._last

    def _contents(self) -> Credentials:
        cert = _read(self.cert, "FULCRUM_TLS_CERT")
        key = cert if self.key == self.cert else _read(self.key, "FULCRUM_TLS_KEY")
        if self._private(key).public_key() != self._public(cert):
            raise _Unfit(
                f"the key in FULCRUM_TLS_KEY={self.key!r} is not that of the certificate in "
                f"FULCRUM_TLS_CERT={self.cert!r}"
            )
        return Credentials(key, cert, _read(self.authority, "FULCRUM_TLS_CA"))

    def _public(self, cert: bytes) -> CertificatePublicKeyTypes:
        try:
            return x509.load_pem_x509_certificate(cert).public_key()
        except ValueError as error:
            raise _Unfit(f"FULCRUM_TLS_CERT={self.cert!r} holds no certificate in PEM: {error}") from None

    def _private(self, key: bytes) -> PrivateKeyTypes:
        try:
            return serialization.load_pem_private_key(key, None, unsafe_skip_rsa_key_validation=True)
        except (TypeError, ValueError) as error:
            raise _Unfit(f"FULCRUM_TLS_KEY={self.key!r} holds no open key in PEM: {error}") from None


@lru_cache(maxsize=MOST_FILES)
def _files(cert: str, key: str, authority: str) -> CredentialFiles:
    # Shared by all channels of this process.
    return CredentialFiles(cert, key, authority)


def channel_credentials(settings: CallSettings) -> grpc.ChannelCredentials:
    """Return mutual TLS by the present files, or the last valid ones. Raise StartupError if they never matched."""
    found = _files(settings.tls_cert, settings.tls_key, settings.tls_ca).read()
    return grpc.ssl_channel_credentials(
        root_certificates=found.authority, private_key=found.key, certificate_chain=found.cert
    )


class ListenerFiles:
    """Credentials of a listener, read again for each connection so that rotating them needs no restart."""

    def __init__(self, settings: CallSettings) -> None:
        self._files = CredentialFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
        self._read = self._files.read()

    def own_role(self) -> CertifiedPeer | None:
        """Return the role that the process's own certificate names, if any."""
        return certified(held_uris(self._read.cert))

    def credentials(self) -> grpc.ServerCredentials:
        """Return mutual TLS by the files as they are when a client connects."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._read),
            self._newer,  # type: ignore[arg-type]  # None, as gRPC's documentation has it
            require_client_authentication=True,
        )

    def _newer(self) -> "grpc.ServerCertificateConfiguration | None":
        # Called on one of gRPC's threads; None means unchanged.
        found = self._files.read()
        if found == self._read:
            return None
        self._read = found
        log.info("certificates were rotated", file=self._files.cert)
        return _configuration(found)


def _read(path: str, variable: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{variable}={path!r} cannot be read: {error.strerror}") from None


def _configuration(read: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(read.key, read.cert)], root_certificates=read.authority)
