"""Tests of `docker compose up`: real images, containers scaled, killed and restarted under load."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from libs.testing.suites.compose import ROOT, ComposeCluster, ComposeLoad, eventually, running_cluster, running_load

PROFILE = os.environ.get("FULCRUM_TEST_COMPOSE", "")
SOME = 20
"""Answers to wait for between two disturbances."""

pytestmark = [
    pytest.mark.skipif(not PROFILE, reason="needs a Docker Engine: run `make test-compose`"),
    pytest.mark.timeout(1800),
]


def tell(text: str) -> None:
    """Print progress, for a test of minutes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@pytest.mark.parametrize("profiles", [("cpu",), ("gpu",), ("sim",), ("sim", "observability"), ("cpu", "observability")])
def test_the_compose_files_are_valid_together(profiles: tuple[str, ...]) -> None:
    options = [word for profile in profiles for word in ("--profile", profile)]
    command = ["docker", "compose", *options, "config", "--format", "json"]
    services = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)["services"]
    for name, service in services.items():
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name
        if service["image"].startswith("fulcrum/"):
            assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"], name


def test_the_planner_may_be_given_the_docker_socket() -> None:
    files = ["-f", "compose.yaml", "-f", "compose/spares.yaml", "--profile", "cpu"]
    command = ["docker", "compose", *files, "config", "--format", "json"]
    environment = {**os.environ, "FULCRUM_DOCKER_GROUP": "998"}
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    planner = json.loads(done.stdout)["services"]["planner"]
    assert planner["environment"]["FULCRUM_PLANNER_ACTUATOR"] == "docker"
    assert planner["group_add"] == ["998"] and planner["read_only"]
    assert any(each["source"] == "/var/run/docker.sock" for each in planner["volumes"])


async def test_no_request_fails_whatever_is_scaled_killed_or_restarted() -> None:
    tell("building and starting")
    started_s = time.monotonic()
    async with running_cluster(PROFILE) as cluster:
        tell(f"healthy after {time.monotonic() - started_s:.0f} s")
        async with running_load(cluster.gateway, cluster.kind.model) as load:
            await load.answers(SOME)
            await scale(cluster, load)
            await kill_each_kind(cluster, load)
            await restart_stores(cluster, load)
            assert load.failed == []
            tell(f"{load.answered} answers, none failed")


async def scale(cluster: ComposeCluster, load: ComposeLoad) -> None:
    """Check that new decode workers join unaided, and that those that leave drop nothing."""
    decode = cluster.kind.decode
    for count in (3, 1):
        tell(f"{decode}: scale to {count}")
        await cluster.scale(decode, count)
        await eventually(f"{count} decode workers are listed", lambda n=count: decoders(cluster, n))
        await load.answers(SOME)
    assert load.failed == []


async def decoders(cluster: ComposeCluster, count: int) -> bool:
    return sum(worker["role"] == "decode" for worker in await cluster.workers()) == count


async def kill_each_kind(cluster: ComposeCluster, load: ComposeLoad) -> None:
    """Kill one of each role, even the last: its requests wait for the next one."""
    kind = cluster.kind
    for service in (kind.decode, kind.prefill, "planner", "metrics"):
        tell(f"{service}: kill")
        await cluster.kill(service)
        await load.answers(SOME)
        assert load.failed == []
    tell(f"{kind.gateway}: kill")
    await load.end_streams()
    await cluster.kill(kind.gateway)
    await load.answers(SOME)
    load.streaming = True
    assert load.failed == []


async def restart_stores(cluster: ComposeCluster, load: ComposeLoad) -> None:
    """Restart broker and Redis, which return on their volumes; occupancy is complete again."""
    for store in ("kafka", "redis"):
        tell(f"{store}: restart")
        await cluster.compose("restart", store)
        await load.answers(SOME)
        assert load.failed == []

    async def covered() -> bool:
        return (await cluster.occupancy()).get("coverage", 0) > 0.99

    await eventually("occupancy covers all workers again", covered)


TLS = "compose/tls.yaml"


async def test_keys_limits_and_files_exist_after_a_restore_of_volumes(tmp_path: Path) -> None:
    """Type the blocks of docs/backup.md, with all containers and volumes removed between them."""
    section = (ROOT / "docs" / "backup.md").read_text().partition("\n## Volumes of containers\n")[2]
    back_up, restore = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    async with running_cluster(PROFILE) as cluster:
        secret = json.loads(await fulcrum(cluster, "keys", "create", "--tenant", "ops", "--role", "admin", "--json"))[
            "key"
        ]
        await fulcrum(cluster, "keys", "limits", "search", "--requests", "600")
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=cluster.gateway, headers=headers, trust_env=False, timeout=30) as http:
            sent = b'{"custom_id": "1"}\n'
            uploaded = await http.post("/v1/files", files={"file": ("lines.jsonl", sent)}, data={"purpose": "batch"})
            file_id = uploaded.raise_for_status().json()["id"]
            tell("back up")
            await typed(cluster, back_up, tmp_path)
            await cluster.compose("down", "--volumes", "--timeout", "40")
            tell("restore")
            await typed(cluster, restore, tmp_path)
            await cluster.compose("up", "-d", "--no-build", "--wait")
            content = (await http.get(f"/v1/files/{file_id}/content")).raise_for_status().content
            assert content == sent
            assert (await http.get("/v1/models", headers={"authorization": ""})).status_code == httpx.codes.UNAUTHORIZED
        limits = json.loads(await fulcrum(cluster, "keys", "limits", "--json"))
        assert {tenant: each["requests_per_minute"] for tenant, each in limits.items()} == {"search": 600}


async def fulcrum(cluster: ComposeCluster, *arguments: str) -> str:
    return await cluster.compose("exec", "-T", cluster.kind.gateway, "fulcrum", *arguments)


async def typed(cluster: ComposeCluster, commands: str, folder: Path) -> None:
    """Type commands at a shell whose `docker compose` is the cluster's."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-ec", commands, cwd=folder, env=cluster.shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-4000:]


async def served_certificate(cluster: ComposeCluster, service: str) -> str:
    """Return the fingerprint of the certificate that a worker shows on a new connection."""
    ask = (
        "import ssl; from libs.runtime.net.authority import describe; from pathlib import Path; import socket, hashlib;"
        "t = Path('/tls'); c = ssl.create_default_context(cafile=t / 'ca.pem');"
        "c.load_cert_chain(t / 'worker.pem'); c.set_alpn_protocols(['h2']);"
        f"s = c.wrap_socket(socket.create_connection(('{service}', 9000), 5), server_hostname='{service}');"
        "print(hashlib.sha256(s.getpeercert(True)).hexdigest())"
    )
    return (await cluster.compose("exec", "-T", service, "python", "-c", ask)).split()[-1]


async def test_no_request_fails_while_certificates_are_rotated_and_a_release_is_replaced() -> None:
    """Rotate by hand, as security-network.md and deploy.md say; streams end before the only gateway is replaced."""

    async def certify(cluster: ComposeCluster) -> None:
        await cluster.compose("run", "--rm", "-T", "certificates", "init")

    async with running_cluster(PROFILE, overlays=(TLS,), before=certify) as cluster:
        kind = cluster.kind
        tell("healthy, with certificates")
        async with running_load(cluster.gateway, kind.model) as load:
            await load.answers(SOME)
            for options in ((), ("--authority",), ("--authority",)):
                shown = {name: await served_certificate(cluster, name) for name in (kind.prefill, kind.decode)}
                tell(f"rotate {' '.join(options)}")
                await cluster.compose("run", "--rm", "-T", "certificates", "rotate", *options)
                for name, before in shown.items():

                    async def changed(name: str = name, before: str = before) -> bool:
                        return await served_certificate(cluster, name) != before

                    await eventually(f"{name} shows its new certificate", changed)
                await load.answers(SOME)
                assert load.failed == []
            await replace_each(cluster, load)
            tell(f"{load.answered} answers, none failed")


async def replace_each(cluster: ComposeCluster, load: ComposeLoad) -> None:
    """Replace the workers, then the gateway, then the rest, by an image of another name."""
    kind, tag = cluster.kind, f"next-{cluster.project}"
    images = {"fulcrum/control", "fulcrum/torch"} if PROFILE == "cpu" else {"fulcrum/control"}
    names = {f"{image}:{tag}" for image in images}
    try:
        for image in images:
            subprocess.run(("docker", "tag", f"{image}:dev", f"{image}:{tag}"), check=True)
        for service in (kind.prefill, kind.decode, kind.gateway, "planner", "metrics"):
            if service == kind.gateway:
                await load.end_streams()
            tell(f"{service}: replace")
            await cluster.upgrade(service, tag)
            await load.answers(SOME)
            load.streaming = True
            assert load.failed == []
            assert names & set((await cluster.compose("ps", "--format", "{{.Image}}", service)).split())
    finally:
        await cluster.compose("down", "--timeout", "40")
        subprocess.run(("docker", "rmi", *names), check=False, capture_output=True)
