"""Settings come from the environment only, through one class per service built on `CommonSettings`."""

import os
import re
import socket
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, SecretStr, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from libs.contracts.errors import StartupError

MemberName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Of one process in the cluster."""
ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


class CommonSettings(BaseSettings):
    """What every service reads. A service's own settings carry its prefix, e.g. FULCRUM_GATEWAY_PORT."""

    model_config = SettingsConfigDict(extra="ignore", populate_by_name=True)

    cluster: ClusterName = Field("local", validation_alias="FULCRUM_CLUSTER")
    """Name in every topic and Redis key, so that clusters can share a broker."""
    kafka: str = Field("127.0.0.1:9092", validation_alias="FULCRUM_KAFKA")
    """Bootstrap servers HOST:PORT[,...], or embedded:FILE written by the embedded broker."""
    kafka_buffer_records: int = Field(20_000, ge=1, validation_alias="FULCRUM_KAFKA_BUFFER_RECORDS")
    """Records that wait for a broker that is away; beyond it the oldest are given up, counted, and show as lost
    coverage."""
    redis: str = Field("redis://127.0.0.1:6379/0", validation_alias="FULCRUM_REDIS")
    """redis://, rediss:// or unix:// address of Redis, with the password it wants."""
    token: SecretStr = Field(SecretStr(""), validation_alias="FULCRUM_TOKEN")
    """Bearer token of admin verbs; empty refuses them all."""
    host: str = Field("127.0.0.1", validation_alias="FULCRUM_HOST")
    """Address to listen on."""
    node: str = Field(default_factory=socket.gethostname, validation_alias="FULCRUM_NODE")
    """Name of this host in figures."""
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", validation_alias="FULCRUM_LOG_LEVEL")
    """Least severe level that is logged."""
    log_format: Literal["json", "console"] = Field("json", validation_alias="FULCRUM_LOG_FORMAT")
    """One JSON object a line, or lines for people."""
    tls_cert: str = Field("", validation_alias="FULCRUM_TLS_CERT")
    """PEM file of this process's gRPC certificate; empty means plaintext."""
    tls_key: str = Field("", validation_alias="FULCRUM_TLS_KEY")
    """PEM file of the certificate's private key."""
    tls_ca: str = Field("", validation_alias="FULCRUM_TLS_CA")
    """PEM file of the authority that signs every process's certificate; peers must show one (mutual TLS)."""


SettingsT = TypeVar("SettingsT", bound=CommonSettings)


def own_name(service: str) -> str:
    """`service` and the host's name: unique where each process has a host of its own, as containers do."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{service}-{host}"[:64]


def load_settings(settings_class: type[SettingsT]) -> SettingsT:
    """Read the environment; raises StartupError with one line that names variable, value and what is allowed."""
    try:
        return settings_class()
    except ValidationError as error:
        raise StartupError("; ".join(_explain(settings_class, item) for item in error.errors())) from None


def variable_of(settings_class: type[CommonSettings], field_name: str) -> str:
    """The environment variable behind a field."""
    alias = settings_class.model_fields[field_name].validation_alias
    return str(alias) if alias else f"{settings_class.model_config.get('env_prefix', '')}{field_name}".upper()


def _explain(settings_class: type[CommonSettings], item: Any) -> str:
    if not item["loc"]:  # of several settings together: the message names them
        return str(item["msg"])
    name = str(item["loc"][0])
    fields = settings_class.model_fields
    variable = variable_of(settings_class, name) if name in fields else name
    hidden = "TOKEN" in variable or "KEY" in variable
    shown = "(hidden)" if hidden else repr(os.environ.get(variable, item.get("input")))
    return f"{variable}={shown}: {item['msg']}"
