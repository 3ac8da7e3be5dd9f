"""vLLM's KV connectors: the supported ones, their hand-over parameters and required packages. Pure, without vLLM."""

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
UNCHECKED: Final = "this vLLM is not known to the checks of KV: reads that leave out blocks are not noticed"


class KvRoute(Enum):
    """The method by which the decode side finds the blocks of a prompt."""

    REPLY = "reply"
    """The prefill side returns the location of the blocks with its answer."""
    NAME = "name"
    """Both sides get the same name, and the decode side also gets the prefill side's address."""
    STORE = "store"
    """The prefill side writes the blocks to a store. The decode side looks them up by their tokens and computes missing
    ones.
    """
    NONE = "none"
    """The connector stores blocks for its own engine only."""


@dataclass(frozen=True, slots=True)
class ConnectorKind:
    """The properties of one of vLLM's connectors."""

    way: KvRoute
    package: str = ""
    """The package that the connector imports; empty if it needs vLLM only."""
    required: str = ""
    """A key that the connector's configuration must contain; empty for none."""
    pins: bool = False
    """True if the connector gives the pages of the KV pool to network cards or other processes.

    Sleep frees these pages, but the connector would still read them.
    """


KINDS: Final[Mapping[str, ConnectorKind]] = {
    NIXL: ConnectorKind(KvRoute.REPLY, "nixl", pins=True),
    "MooncakeConnector": ConnectorKind(KvRoute.NAME, "mooncake", pins=True),
    "LMCacheConnectorV1": ConnectorKind(KvRoute.STORE, "lmcache", pins=True),
    "LMCacheMPConnector": ConnectorKind(KvRoute.STORE, "lmcache", pins=True),
    "MooncakeStoreConnector": ConnectorKind(KvRoute.STORE, "mooncake", pins=True),
    "OffloadingConnector": ConnectorKind(KvRoute.STORE, required="spec_name"),
    "ExampleConnector": ConnectorKind(KvRoute.STORE, required="shared_storage_path"),
    "SimpleCPUOffloadConnector": ConnectorKind(KvRoute.NONE),
    MULTI: ConnectorKind(KvRoute.NONE, required="connectors"),
}


@dataclass(frozen=True, slots=True)
class Connector:
    """The checked connector that a worker's settings select."""

    name: str
    way: KvRoute
    config: Mapping[str, Any]
    """The connector's own configuration, which becomes vLLM's kv_connector_extra_config."""

    @property
    def layout(self) -> str:
        """The connector's part of the KV layout's name."""
        if self.name != MULTI:
            return self.name
        return "+".join(child["kv_connector"] for child in self.config["connectors"])

    @property
    def outlives_sleep(self) -> bool:
        """True if the connector still works after its engine has slept."""
        names = [self.name, *(child["kv_connector"] for child in self.config.get("connectors", ()))]
        return not any(KINDS[name].pins for name in names)

    @property
    def shakes_hands(self) -> bool:
        """True if NIXL, where used, compares layouts before it reads. Settings can disable that check."""
        configs = [self.config, *(child["kv_connector_extra_config"] for child in self.config.get("connectors", ()))]
        return all(config.get("enforce_handshake_compat", True) for config in configs)

    @property
    def holds(self) -> bool:
        """True if the blocks remain in the engine that computed them until the receiver reads them.

        The engine may overwrite blocks that have been read.
        """
        return self.way is not KvRoute.STORE


def connector_of(config: EngineConfig) -> Connector:
    """Return the connector that the settings select. Raise StartupError for one that cannot hand sequences over."""
    lease_s = max(config.kv_lease_ms // 1000, 1)
    found = _checked(config.vllm_connector, config.vllm_connector_config, lease_s)
    if found.way is KvRoute.NONE:
        raise StartupError(
            f"KV connector {found.name!r} keeps blocks for its own engine: beside it, in a {MULTI}, one of"
            f" {_names(KvRoute.REPLY, KvRoute.NAME, KvRoute.STORE)} must hand them over"
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
    """Combine several connectors. The first that can hand sequences over does so, and the others keep their own use."""
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
    way = next((way for way in (KvRoute.REPLY, KvRoute.NAME, KvRoute.STORE) if way in ways), KvRoute.NONE)
    return Connector(MULTI, way, {**config, "connectors": settings})


def _names(*ways: KvRoute) -> str:
    return ", ".join(name for name, kind in KINDS.items() if kind.way in ways)


@dataclass(frozen=True, slots=True)
class ConnectorSession:
    """The connector of a running engine, and the parameters of sequences that it hands over."""

    connector: Connector
    engine_id: str
    """The connector's id, a new one at each start."""
    bootstrap: str = ""
    """The URL at which the connector's names are resolved; empty if it needs none."""

    def transfer_params(self, name: str) -> dict[str, Any] | None:
        """Return the kv_transfer_params of a prompt that is computed for another engine.

        `name` is its id in this engine.
        """
        match self.connector.way:
            case KvRoute.REPLY:
                return {"do_remote_decode": True}
            case KvRoute.NAME:
                return {"do_remote_decode": True, "transfer_id": self._transfer_id(name)}
            case _:
                return None

    def left(self, name: str, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the decode side's parameters from vLLM's `answer` on the prefill side; None if there are none."""
        match self.connector.way:
            case KvRoute.REPLY:
                return answer
            case KvRoute.NAME:
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
