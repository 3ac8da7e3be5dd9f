"""Tests of where an API server is looked for, and of the error if there is none."""

from pathlib import Path

import pytest

from libs.actuators.kubernetes_client import ShellClient
from libs.contracts.errors import InvalidRequest
from libs.observe.pod_watch import PodFollower
from libs.observe.pods import PodQuery

CONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
contexts: [{name: x, context: {cluster: c, user: u NAMESPACE}}]
current-context: x
"""


@pytest.mark.parametrize("text", [None, "", "[", "kind: Config", "contexts: 3\ncurrent-context: x"])
async def test_an_invalid_kubeconfig_ends_the_command_with_its_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    pods = PodFollower(PodQuery("app=vllm"), str(file))
    with pytest.raises(InvalidRequest, match="no configuration for a Kubernetes API server"):
        await pods.begin()
    await pods.close()


@pytest.mark.parametrize(("given", "namespace"), [("", "default"), (", namespace: serving", "serving")])
async def test_the_namespace_is_that_of_the_kubeconfig(tmp_path: Path, given: str, namespace: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(CONFIG.replace("NAMESPACE", given))
    client = ShellClient(str(file))
    await client.connected()
    assert client.namespace == namespace
    await client.close()


async def test_an_api_server_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(CONFIG.replace("NAMESPACE", ""))
    pods = PodFollower(PodQuery("app=vllm"), str(file))
    await pods.begin()
    assert "does not answer" in pods.trouble
    assert pods.targets == []
    await pods.close()
