"""A cluster's certificate authority, the certificates of its services, and gRPC credentials made from their files.

A certificate names the role of its holder as the path of a URI, `spiffe://CLUSTER.fulcrum/ROLE`, by which a worker
tells a gateway from a planner (`libs.runtime.net.access`). Files are PEM; only their owner can read keys.
"""

import contextlib
import datetime
import ipaddress
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from libs.contracts.errors import StartupError
from libs.runtime.net.access import CERTIFICATE_ROLES, CallSettings, CertificateRole, CertifiedPeer, certified, role_uri
from libs.runtime.paths import private_folder

AUTHORITY_DAYS: Final = 3650
# Certificates are valid from this long before they are made, as hosts' clocks differ.
CLOCK_SKEW: Final = datetime.timedelta(minutes=5)
# ca.pem holds the authority that signs and the previous one, so that processes that have not read the new one are
# still recognized.
MAX_AUTHORITIES: Final = 2
_CA, _CA_KEY = "ca.pem", "ca-key.pem"


@dataclass(frozen=True, slots=True)
class Issued:
    role: str
    file: Path
    """Certificate and key in one file, so that one rename replaces both."""
    names: tuple[str, ...]
    expires: datetime.datetime


def describe(folder: Path) -> list[Issued]:
    """Return the certificates of roles that are in the folder. Raise StartupError if they cannot be read."""
    try:
        return [
            _described(role, folder / f"{role}.pem") for role in CERTIFICATE_ROLES if (folder / f"{role}.pem").exists()
        ]
    except (OSError, ValueError) as error:
        raise StartupError(f"certificates in {folder} cannot be read: {error}") from error


def _described(role: str, file: Path) -> Issued:
    cert = x509.load_pem_x509_certificate(file.read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return Issued(role, file, tuple(hosts), cert.not_valid_after_utc)


def held_uris(certificate: bytes) -> list[str]:
    """Return the URIs that a certificate names its holder by; none if it is not a certificate."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


@dataclass(frozen=True, slots=True)
class _Authority:
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def issue(
    folder: Path,
    cluster: str,
    *,
    now: datetime.datetime,
    names: Sequence[str],
    roles: Sequence[CertificateRole] = CERTIFICATE_ROLES,
    days: int = 90,
    new_authority: bool = False,
) -> list[Issued]:
    """Write a certificate for each role into `folder`, and an authority if there is none. Raise StartupError.

    Each file is replaced as a whole, so that a concurrent reader sees the old or the new one. `names` are the host
    names and addresses that services are reached by. With `new_authority`, a new authority is made, and the last
    one stays trusted until the next time.
    """
    try:
        private_folder(folder, allowed=0o055)
        authority = None if new_authority else _load_authority(folder)
        if authority is None:
            authority = _make_authority(cluster, now)
            trusted = (authority.cert, *_trusted(folder))[:MAX_AUTHORITIES]
            _write(folder / _CA_KEY, _private(authority.key), mode=0o600)
            _write(folder / _CA, b"".join(map(_public, trusted)), mode=0o644)
        return [_issue_one(folder, cluster, role, authority, now=now, names=names, days=days) for role in roles]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartupError(f"certificates cannot be made in {folder}: {why}") from error


def _load_authority(folder: Path) -> _Authority | None:
    key_file = folder / _CA_KEY
    if not key_file.exists():
        return None
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StartupError(f"{key_file} is not a key made by `fulcrum tls init`")
    return _Authority(_trusted(folder)[0], key)


def _trusted(folder: Path) -> list[x509.Certificate]:
    file = folder / _CA
    return x509.load_pem_x509_certificates(file.read_bytes()) if file.exists() else []


def _make_authority(cluster: str, now: datetime.datetime) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each has a separate name, because a reader of ca.pem looks an issuer up by it.
    name = _name(f"Fulcrum {cluster} authority {secrets.token_hex(4)}")
    cert = (
        _builder(name, name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Authority(cert, key)


def _issue_one(
    folder: Path,
    cluster: str,
    role: CertificateRole,
    authority: _Authority,
    *,
    now: datetime.datetime,
    names: Sequence[str],
    days: int,
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = [x509.UniformResourceIdentifier(role_uri(cluster, role)), *map(_host_name, names)]
    purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    cert = (
        _builder(_name(f"Fulcrum {cluster} {role}"), authority.cert.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(purposes, critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    issued = Issued(role, folder / f"{role}.pem", tuple(names), cert.not_valid_after_utc)
    _write(issued.file, _public(cert) + _private(key), mode=0o600)
    return issued


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _public(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, *, mode: int) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


log = structlog.get_logger()

# Mismatched files may just be being replaced, so a start reads them this many times.
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
        """Take the paths of the files; those of certificate and key may be equal."""
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
        log.warning("certificates cannot be read: the last ones stay in use", error=problem.message)
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
