"""Test of `docker compose --profile gpu up` on a machine without a GPU. A stand-in of NVIDIA's hook
(deploy/images/nvidia_stand_in) hands out GPUs, every container starts as intended, and the workers say in a sentence
what is missing."""

import json
import os
import resource
import subprocess
from typing import Any

import httpx
import pytest

from libs.testing.suites.compose import ROOT, ComposeCluster, eventually, running_cluster

IMAGE = "fulcrum/vllm:dev"
USER = "10001"
NO_GPU = "finds no GPU here"
UNLIMITED = -1

pytestmark = [
    pytest.mark.skipif(not os.environ.get("FULCRUM_TEST_GPU_START"), reason="10 GB: run `make test-gpu-start`"),
    pytest.mark.timeout(3600),
]


async def inspected(cluster: ComposeCluster, service: str) -> dict[str, Any]:
    """Return docker's description of a service's container."""
    (container,) = (await cluster.compose("ps", "--all", "--quiet", service)).split()
    reported = subprocess.run(("docker", "inspect", container), check=True, capture_output=True).stdout
    (found,) = json.loads(reported)
    return dict(found)


async def in_worker(cluster: ComposeCluster, *command: str) -> str:
    """Return the output of a command in a container like the prefill worker's, whether it succeeds or not."""
    shell = ("sh", "-c", '"$@" 2>&1 || echo "exit code $?"', "sh")
    run = ("--progress", "quiet", "run", "--rm", "-T", "--no-deps", cluster.kind.prefill)
    return await cluster.compose(*run, *shell, *command)


def memlock_bytes() -> int:
    """Return the memory that docker lets a container lock, which an unprivileged one cannot raise."""
    command = ("docker", "run", "--rm", "--ulimit", f"memlock={UNLIMITED}", IMAGE, "true")
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    if refused.returncode == 0:
        return UNLIMITED
    assert "error setting rlimit" in refused.stderr, refused.stderr
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]


def test_pinned_memory_is_unlimited_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["docker", "compose", "--profile", "gpu", "config", "--format", "json"]
    for requested, given in (("", UNLIMITED), ("8388608", 8388608)):
        monkeypatch.setenv("FULCRUM_MEMLOCK_BYTES", requested)
        services = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)["services"]
        assert [services[name]["ulimits"]["memlock"] for name in ("prefill-gpu", "decode-gpu")] == [given, given]


async def test_all_containers_without_need_of_a_driver_start_and_workers_name_the_missing_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned_bytes = memlock_bytes()
    if pinned_bytes != UNLIMITED:
        print(f"this engine may not lift its limit: workers may pin {pinned_bytes} bytes")
        monkeypatch.setenv("FULCRUM_MEMLOCK_BYTES", str(pinned_bytes))
    async with running_cluster("gpu", healthy=False) as cluster:
        await model_is_there(cluster)
        for service in (cluster.kind.prefill, cluster.kind.decode):

            async def reported(service: str = service) -> bool:
                return NO_GPU in await cluster.compose("logs", "--no-color", service)

            await eventually(f"{service} says that there is no GPU", reported, timeout_s=300)
            await check_container(cluster, service, pinned_bytes)
        written = (await in_worker(cluster, "sh", "-c", "id -u; touch ~/kernel && echo kept in ~")).splitlines()
        assert written == [USER, "kept in /cache"]
        doctor = await in_worker(cluster, "fulcrum", "doctor", "--engine", "vllm")
        assert "the build for GPUs, and none is here" in doctor and "exit code 1" in doctor
        assert doctor.count("\N{BALLOT X}") == 1, doctor
        await gateway_waits(cluster)
        log = await cluster.compose("logs", "--no-color")
        assert "Traceback" not in log
        assert "cannot be written" not in log and "Read-only file system" not in log


async def model_is_there(cluster: ComposeCluster) -> None:
    """The default model is in its volume, whole, at the first try."""
    container = await inspected(cluster, "model-gpu")
    assert (container["State"]["ExitCode"], container["RestartCount"]) == (0, 0)
    files = await in_worker(cluster, "ls", f"/models/{cluster.kind.model}")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files.split())


async def check_container(cluster: ComposeCluster, service: str, pinned_bytes: int) -> None:
    """Check that it has all GPUs, common namespaces, lockable memory, and nothing beyond."""
    container = await inspected(cluster, service)
    host = container["HostConfig"]
    assert host["DeviceRequests"][0]["Driver"] == "nvidia"
    assert host["DeviceRequests"][0]["Count"] == -1
    assert (host["IpcMode"], host["PidMode"], host["ReadonlyRootfs"]) == ("host", "host", True)
    assert host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert {"Name": "memlock", "Hard": pinned_bytes, "Soft": pinned_bytes} in host["Ulimits"]
    assert any(each["Destination"] == "/cache" and each["RW"] for each in container["Mounts"])
    assert any(each["Destination"] == "/models" and not each["RW"] for each in container["Mounts"])


async def gateway_waits(cluster: ComposeCluster) -> None:
    """The model is there, the gateway answers, and a request is told when to come again."""
    question = {"model": cluster.kind.model, "messages": [{"role": "user", "content": "The capital of France?"}]}
    async with httpx.AsyncClient(base_url=cluster.gateway, trust_env=False, timeout=60) as client:

        async def up() -> bool:
            try:
                return (await client.get("/healthz")).is_success
            except httpx.TransportError:
                return False

        await eventually("the gateway answers", up, timeout_s=120)
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == [cluster.kind.model]
        answer = await client.post("/v1/chat/completions", json=question)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0, answer.text
