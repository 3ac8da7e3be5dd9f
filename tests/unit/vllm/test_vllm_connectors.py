"""Tests of the KV connector of a vllm worker, of refused ones, and of the parameters that each gets."""

from typing import Any

import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.vllm.connectors import KINDS, Connector, ConnectorSession, KvRoute, connector_of

STORE = {"shared_storage_path": "/somewhere"}


def of(name: str, **config: Any) -> Connector:
    return connector_of(EngineConfig(None, "m", kv_lease_ms=7_000, vllm_connector=name, vllm_connector_config=config))


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        (
            "Pigeon",
            {},
            "there is no KV connector 'Pigeon' here: FULCRUM_WORKER_VLLM_CONNECTOR is one of Nixl",
        ),
        ("LMCacheConnectorV1", {}, "needs the Python package 'lmcache', which is not installed"),
        ("ExampleConnector", {}, "needs 'shared_storage_path' in FULCRUM_WORKER_VLLM_CONNECTOR_CONFIG"),
        ("OffloadingConnector", {}, "needs 'spec_name'"),
        ("SimpleCPUOffloadConnector", {}, "keeps blocks for its own engine"),
        ("MultiConnector", {}, "needs 'connectors'"),
        ("MultiConnector", {"connectors": ["NixlConnector"]}, '{"connectors": [{"kv_connector": NAME'),
        ("MultiConnector", {"connectors": [{"kv_connector": "Pigeon"}]}, "there is no KV connector 'Pigeon'"),
        ("MultiConnector", {"connectors": [{"kv_connector": "SimpleCPUOffloadConnector"}]}, "beside it"),
    ],
)
def test_an_unavailable_connector_is_refused_in_one_line(name: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError) as caught:
        of(name, **config)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError) as caught:
        of("Pigeon")
    assert all(name in str(caught.value) for name in KINDS)


def test_several_connectors_get_their_roles_and_the_first_that_hands_over_does_so() -> None:
    child = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": STORE}
    found = of("MultiConnector", connectors=[{"kv_connector": "SimpleCPUOffloadConnector"}, child])
    assert (found.way, found.layout) == (KvRoute.STORE, "SimpleCPUOffloadConnector+ExampleConnector")
    assert [child["kv_role"] for child in found.config["connectors"]] == ["kv_both", "kv_both"]
    assert found.config["connectors"][1]["kv_connector_extra_config"] == STORE


def test_the_parameters_of_a_sequence_depend_on_how_its_blocks_are_found() -> None:
    def reported(way: KvRoute) -> tuple[Any, Any]:
        handing = ConnectorSession(Connector("some", way, {}), "engine-1", "http://host:1")
        return handing.transfer_params("7-request"), handing.left("7-request", None)

    assert reported(KvRoute.REPLY) == ({"do_remote_decode": True}, None)
    assert reported(KvRoute.STORE) == (None, {})
    requested, left = reported(KvRoute.NAME)
    assert requested["transfer_id"] == left["transfer_id"] == "engine-1/7-request"
    assert left["remote_engine_id"] == "engine-1" and left["remote_bootstrap_addr"] == "http://host:1"
