"""Settings come from the environment only, through one class for each service built on `CommonSettings`."""

import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SecretStr, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from libs.contracts.errors import StartupError

MemberName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of one process in the cluster."""
ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
# Random bytes in a generated token.
TOKEN_BYTES = 24


class CommonSettings(BaseSettings):
    """Settings that every service reads. A service's own settings carry its prefix, e.g. FULCRUM_GATEWAY_PORT."""

    model_config = SettingsConfigDict(extra="ignore", populate_by_name=True)

    cluster: ClusterName = Field("local", validation_alias="FULCRUM_CLUSTER")
    """Name in every topic and Redis key, so that clusters can share a broker."""
    kafka: str = Field("127.0.0.1:9092", validation_alias="FULCRUM_KAFKA")
    """Addresses of the Kafka bootstrap servers: HOST:PORT[,HOST:PORT...]."""
    kafka_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", validation_alias="FULCRUM_KAFKA_PROTOCOL"
    )
    """Protocol of the brokers' listener, by Kafka's name."""
    kafka_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = Field(
        "SCRAM-SHA-512", validation_alias="FULCRUM_KAFKA_MECHANISM"
    )
    """SASL mechanism, if the protocol is one of SASL."""
    kafka_user: str = Field("", validation_alias="FULCRUM_KAFKA_USER")
    """User name at the brokers, if the protocol is one of SASL."""
    kafka_password: SecretStr = Field(SecretStr(""), validation_alias="FULCRUM_KAFKA_PASSWORD")
    """Password of that user, if the protocol is one of SASL."""
    kafka_ca: str = Field("", validation_alias="FULCRUM_KAFKA_CA")
    """PEM file of the authority behind the brokers' certificates; empty means those that the machine trusts."""
    kafka_cert: str = Field("", validation_alias="FULCRUM_KAFKA_CERT")
    """PEM file of the client certificate for brokers that require one."""
    kafka_key: str = Field("", validation_alias="FULCRUM_KAFKA_KEY")
    """PEM file of that certificate's key; empty means the same file."""
    kafka_buffer_records: int = Field(20_000, ge=1, validation_alias="FULCRUM_KAFKA_BUFFER_RECORDS")
    """Records that wait for a broker that is away. Beyond it the oldest are dropped, counted, and show as lost
    coverage.
    """
    kafka_copies: int = Field(0, ge=0, le=9, validation_alias="FULCRUM_KAFKA_COPIES")
    """Copies of each topic that services create; 0 is three, or one for each broker if FULCRUM_KAFKA names
    fewer and no more are up. Topics are created once that many brokers are up.
    """
    kafka_in_sync: int = Field(0, ge=0, le=9, validation_alias="FULCRUM_KAFKA_IN_SYNC")
    """Copies that must have a record before it counts as written (min.insync.replicas).

    0 stands for two if there are three copies or more, else for one.
    """
    redis: str = Field("redis://127.0.0.1:6379/0", validation_alias="FULCRUM_REDIS")
    """redis://, rediss:// or unix:// address of Redis, with user and password if it requires them:
    rediss://USER:PASSWORD@HOST. With rediss://, ?ssl_ca_certs=FILE names a private authority, and ssl_certfile and
    ssl_keyfile a client certificate. redis+sentinel://HOST:26379,HOST:26379/NAME/0 names sentinels and their primary;
    sentinels' own password is ?sentinel_password=.
    """
    token: SecretStr = Field(SecretStr(""), validation_alias="FULCRUM_TOKEN")
    """Bearer token of admin verbs and, beyond loopback, of every gRPC call that shows no certificate; empty refuses
    them all.
    """
    token_file: Path | None = Field(None, validation_alias="FULCRUM_TOKEN_FILE")
    """File to take the token from if FULCRUM_TOKEN is empty. The first process that finds no file creates it with a
    random token.
    """
    allow_plaintext_token: bool = Field(False, validation_alias="FULCRUM_ALLOW_PLAINTEXT_TOKEN")
    """Accept that the token can be read on the network by whoever listens there; without it, gRPC beyond loopback
    requires TLS.
    """
    host: str = Field("127.0.0.1", validation_alias="FULCRUM_HOST")
    """Address to listen on; 127.0.0.1 accepts connections of this host only."""
    node: str = Field(default_factory=socket.gethostname, validation_alias="FULCRUM_NODE")
    """Name of this host in figures and lists of workers."""
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", validation_alias="FULCRUM_LOG_LEVEL")
    """Least severe level of events that reach the log."""
    log_format: Literal["json", "console"] = Field("json", validation_alias="FULCRUM_LOG_FORMAT")
    """`json` writes one JSON object per line, `console` readable text."""
    tls_cert: str = Field("", validation_alias="FULCRUM_TLS_CERT")
    """PEM file of this process's gRPC certificate. Key and authority must be set with it; without all three, gRPC is
    plaintext.
    """
    tls_key: str = Field("", validation_alias="FULCRUM_TLS_KEY")
    """PEM file of the certificate's private key."""
    tls_ca: str = Field("", validation_alias="FULCRUM_TLS_CA")
    """PEM file of the authority that signs every process's certificate; peers must show one (mutual TLS)."""
    tls_folder: Path | None = Field(None, validation_alias="FULCRUM_TLS_FOLDER")
    """Folder that `fulcrum tls init` has filled, or one with copies of ca.pem and this process's file, in place of the
    three.
    """

    tls_role: ClassVar[str] = "operator"
    """Name of the certificate file in `tls_folder` that belongs to this process."""

    @field_validator("token_file", "tls_folder", mode="before")
    @classmethod
    def _no_file(cls, value: object) -> object:
        return value or None

    @field_validator("redis")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        from libs.runtime.redis import check_url  # noqa: PLC0415 (slow, and not needed for the default)

        check_url(url)
        return url

    @model_validator(mode="after")
    def _kafka_user_is_whole(self) -> Self:
        sasl = self.kafka_protocol.startswith("SASL")
        if sasl and not (self.kafka_user and self.kafka_password.get_secret_value()):
            raise ValueError(f"FULCRUM_KAFKA_PROTOCOL={self.kafka_protocol} needs FULCRUM_KAFKA_USER and _PASSWORD")
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        # Incomplete settings would silently mean plaintext, or a listener that authenticates no one.
        if self.tls_folder is not None and not (self.tls_cert or self.tls_key or self.tls_ca):
            own = self.tls_folder / f"{self.tls_role}.pem"
            self.tls_cert, self.tls_key, self.tls_ca = str(own), str(own), str(self.tls_folder / "ca.pem")
        files = {"FULCRUM_TLS_CERT": self.tls_cert, "FULCRUM_TLS_KEY": self.tls_key, "FULCRUM_TLS_CA": self.tls_ca}
        missing = [variable for variable, path in files.items() if not path]
        if 0 < len(missing) < len(files):
            raise ValueError(f"TLS needs {' and '.join(missing)} as well: set all of {', '.join(files)}, or none")
        return self


SettingsT = TypeVar("SettingsT", bound=CommonSettings)


def own_name(service: str) -> str:
    """Return `service` with the host's name, which is unique if each process has its own host, as containers do."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{service}-{host}"[:64]


def load_settings(settings_class: type[SettingsT]) -> SettingsT:
    """Read the environment. Raise StartupError with one line that names the variable and the allowed values."""
    try:
        settings = settings_class()
    except ValidationError as error:
        raise StartupError("; ".join(_explain(settings_class, item) for item in error.errors())) from None
    if settings.token_file is not None and not settings.token.get_secret_value():
        settings.token = SecretStr(_token_from(settings.token_file))
    return settings


def _token_from(path: Path) -> str:
    """Return the token in a file, which is created if missing. Processes that create it at once all get one token."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(TOKEN_BYTES))
            try:
                with suppress(FileExistsError):
                    path.hardlink_to(part)  # whole once it is there, and never over another's
            finally:
                part.unlink()
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise StartupError(f"FULCRUM_TOKEN_FILE={str(path)!r} cannot be read or made: {reason}") from None
    if not token:
        raise StartupError(f"FULCRUM_TOKEN_FILE={str(path)!r} is empty: put a token into it, or remove it")
    return token


def variable_of(settings_class: type[CommonSettings], field_name: str) -> str:
    """Return the environment variable behind a field."""
    alias = settings_class.model_fields[field_name].validation_alias
    return str(alias) if alias else f"{settings_class.model_config.get('env_prefix', '')}{field_name}".upper()


def _explain(settings_class: type[CommonSettings], item: Any) -> str:
    if not item["loc"]:  # the error concerns several settings, which its message names
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(item["loc"][0])
    fields = settings_class.model_fields
    variable = variable_of(settings_class, name) if name in fields else name
    hidden = any(word in variable for word in ("TOKEN", "KEY", "PASSWORD", "REDIS"))
    shown = "(hidden)" if hidden else repr(os.environ.get(variable, item.get("input")))
    return f"{variable}={shown}: {str(item['msg']).removeprefix('Value error, ')}"
