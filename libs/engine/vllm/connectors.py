"""vLLM's KV connectors: the known ones, their parameters of a hand-over, and what must be installed. Pure, no vLLM."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig

CONNECTOR_SETTING: Final = "FULCRUM_WORKER_VLLM_CONNECTOR"
CONFIG_SETTING: Final = "FULCRUM_WORKER_VLLM_CONNECTOR_CONFIG"
NIXL: Final = "NixlConnector"
MULTI: Final = "MultiConnector"


class Way(Enum):
    """How the decode side learns where blocks are."""

    REPLY = "reply"
    """The prefill side's answer says so."""
    NAME = "name"
    """Both sides get one name, and the decode side the address to fetch it from."""
    STORE = "store"
    """The prefill side has put them where the decode side looks by their tokens; what it misses there it computes."""
    NONE = "none"
    """It keeps blocks for its own engine."""


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """One of vLLM's connectors."""

    way: Way
    package: str = ""
    """That must be importable; empty: vLLM alone."""
    required: str = ""
    """A key that its configuration must have."""
    pins: bool = False
    """Whether it gives network cards or other processes the pages that KV lies in: an engine that sleeps gives these
    pages up, and the connector would go on reading them."""


KINDS: Final[Mapping[str, ConnectorKind]] = {
    NIXL: ConnectorKind(Way.REPLY, "nixl", pins=True),
    "MooncakeConnector": ConnectorKind(Way.NAME, "mooncake", pins=True),
    "LMCacheConnectorV1": ConnectorKind(Way.STORE, "lmcache", pins=True),
    "LMCacheMPConnector": ConnectorKind(Way.STORE, "lmcache", pins=True),
    "MooncakeStoreConnector": ConnectorKind(Way.STORE, "mooncake", pins=True),
    "OffloadingConnector": ConnectorKind(Way.STORE, required="spec_name"),
    "ExampleConnector": ConnectorKind(Way.STORE, required="shared_storage_path"),
    "SimpleCPUOffloadConnector": ConnectorKind(Way.NONE),
    MULTI: ConnectorKind(Way.NONE, required="connectors"),
}


@dataclass(frozen=True, slots=True)
class Connector:
    """What a worker's settings ask for, checked."""

    name: str
    way: Way
    config: Mapping[str, Any]
    """vLLM's kv_connector_extra_config."""

    @property
    def layout(self) -> str:
        """Its part of the name of a kind of KV."""
        if self.name != MULTI:
            return self.name
        return "+".join(child["kv_connector"] for child in self.config["connectors"])

    @property
    def outlives_sleep(self) -> bool:
        """Whether it works as before once its engine has slept."""
        names = [self.name, *(child["kv_connector"] for child in self.config.get("connectors", ()))]
        return not any(KINDS[name].pins for name in names)

    @property
    def shakes_hands(self) -> bool:
        """Whether NIXL, where it is among them, refuses blocks that are not like its own; a person can forbid that."""
        configs = [self.config, *(child["kv_connector_extra_config"] for child in self.config.get("connectors", ()))]
        return all(config.get("enforce_handshake_compat", True) for config in configs)

    @property
    def holds(self) -> bool:
        """Whether blocks wait for their receiver in the engine that computed them. Once they were read it is free to
        write over them."""
        return self.way is not Way.STORE


def connector_of(config: EngineConfig) -> Connector:
    """The connector that the settings ask for. Raises StartupError for one that cannot hand sequences over here."""
    lease_s = max(config.kv_lease_ms // 1000, 1)
    found = _checked(config.vllm_connector, config.vllm_connector_config, lease_s)
    if found.way is Way.NONE:
        raise StartupError(
            f"KV connector {found.name!r} keeps blocks for its own engine: beside it, in a {MULTI}, one of"
            f" {_names(Way.REPLY, Way.NAME, Way.STORE)} must hand them over"
        )
    return found


def _checked(name: str, config: Mapping[str, Any], lease_s: int) -> Connector:
    kind = KINDS.get(name)
    if kind is None:
        raise StartupError(f"there is no KV connector {name!r} here: {CONNECTOR_SETTING} is one of {', '.join(KINDS)}")
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise StartupError(
            f"KV connector {name!r} needs the Python package {kind.package!r}, which is not installed; known are"
            f" {', '.join(KINDS)}"
        )
    if kind.required and not config.get(kind.required):
        raise StartupError(f"KV connector {name!r} needs {kind.required!r} in {CONFIG_SETTING}, a JSON object")
    if name == MULTI:
        return _multi(config, lease_s)
    lease = {"kv_lease_duration": lease_s} if name == NIXL else {}
    return Connector(name, kind.way, dict(config) | lease)


def _multi(config: Mapping[str, Any], lease_s: int) -> Connector:
    """Several at once: the first that hands over does, the others keep what they can."""
    try:
        children: Sequence[tuple[Mapping[str, Any], Connector]] = [
            (child, _checked(child["kv_connector"], child.get("kv_connector_extra_config", {}), lease_s))
            for child in config["connectors"]
        ]
    except (TypeError, KeyError, AttributeError):
        raise StartupError(
            f"{MULTI} needs connectors in {CONFIG_SETTING} as"
            ' {"connectors": [{"kv_connector": NAME, "kv_connector_extra_config": {...}}, ...]}'
        ) from None
    settings = [
        {"kv_role": "kv_both", **child, "kv_connector_extra_config": dict(checked.config)}
        for child, checked in children
    ]
    ways = [checked.way for _, checked in children]
    way = next((way for way in (Way.REPLY, Way.NAME, Way.STORE) if way in ways), Way.NONE)
    return Connector(MULTI, way, {**config, "connectors": settings})


def _names(*ways: Way) -> str:
    return ", ".join(name for name, kind in KINDS.items() if kind.way in ways)


@dataclass(frozen=True, slots=True)
class Handing:
    """The connector parameters of a running engine for the sequences that it hands over."""

    connector: Connector
    engine_id: str
    """The id of the connector, new at each start."""
    bootstrap: str = ""
    """URL at which the connector is asked for names."""

    def asked(self, name: str) -> dict[str, Any] | None:
        """The kv_transfer_params of a prompt that is computed for others, under its name in the engine."""
        match self.connector.way:
            case Way.REPLY:
                return {"do_remote_decode": True}
            case Way.NAME:
                return {"do_remote_decode": True, "transfer_id": self._transfer_id(name)}
            case _:
                return None

    def left(self, name: str, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Parameters of the decode side, from vLLM's `answer` on the prefill side; None: the connector has failed."""
        match self.connector.way:
            case Way.REPLY:
                return answer
            case Way.NAME:
                return {
                    "do_remote_prefill": True,
                    "remote_engine_id": self.engine_id,
                    "remote_request_id": name,
                    "remote_bootstrap_addr": self.bootstrap,
                    "transfer_id": self._transfer_id(name),
                }
            case _:
                return {}

    def _transfer_id(self, name: str) -> str:
        return f"{self.engine_id}/{name}"
