"""A namespace of its own for a test, with the chart in it, and kubeconfigs of its service accounts."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

CHART: Final = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "fulcrum"
RELEASE: Final = "fulcrum"
OLDEST: Final = "1.30"
"""Kubernetes that the chart takes."""
COMMAND_S: Final = 60.0
CHECK_EVERY_S: Final = 0.4


class CommandFailed(Exception):
    """What it said."""


async def run(*command: str, stdin: str = "") -> str:
    """Its output. Raises CommandFailed with what it said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, said = await process.communicate(stdin.encode())
    except TimeoutError:
        process.kill()
        raise CommandFailed(f"{' '.join(command)}: no end after {COMMAND_S:.0f} s") from None
    if process.returncode:
        raise CommandFailed(f"{' '.join(command)}: {said.decode().strip()}")
    return out.decode()


async def render(*options: str, namespace: str = "default") -> str:
    """The chart's objects as YAML."""
    known = ("--kube-version", OLDEST)  # a helm that was built by `go install` takes every cluster for an old one
    return await run("helm", "template", RELEASE, str(CHART), "--namespace", namespace, *known, *options)


def several_nodes() -> tuple[str, ...]:
    """Values of three decode workers that span two nodes each."""
    pool = {"role": "decode", "replicas": 3, "nodes": 2, "gpus": 8, "env": {
        "FULCRUM_WORKER_VLLM_ARGUMENTS": json.dumps({"tensor_parallel_size": 16})
    }}  # fmt: skip
    named = ("--set", "engine=vllm", "--set", "model.name=some/model")
    return (*named, "--set-json", f"pools.decode={json.dumps(pool)}")


class Namespace:
    """One in which pods have to keep to the restricted Pod Security Standard."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    async def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """As the cluster's administrator."""
        return await run("kubectl", "--namespace", self.name, *arguments, stdin=stdin)

    async def helm(self, verb: str, *options: str) -> str:
        """install or upgrade."""
        return await run("helm", verb, RELEASE, str(CHART), "--namespace", self.name, *options)

    async def get(self, *what: str) -> Any:
        """Objects as JSON."""
        return json.loads(await self.kubectl("get", *what, "--output", "json"))

    async def account(self, name: str, *, server: str = "") -> str:
        """A kubeconfig file with a token of this service account, for the real server or one on the way to it."""
        admin = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
        cluster = admin["clusters"][0]["cluster"]
        if server:
            cluster = {"server": server, "insecure-skip-tls-verify": True}
        token = (await self.kubectl("create", "token", name)).strip()
        path = self._folder / f"{name}-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }))  # fmt: skip
        return str(path)

    async def admin(self, server: str) -> str:
        """A kubeconfig file of the cluster's administrator over a way to the server."""
        found = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
        found["clusters"][0]["cluster"] = {"server": server, "insecure-skip-tls-verify": True}
        path = self._folder / f"admin-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps(found))
        return str(path)

    async def ready_pods(self, component: str) -> set[str]:
        """Names of a component's pods that are ready and do not end."""
        found = await self.get("pods", "--selector", f"app.kubernetes.io/component={component}")
        return {
            each["metadata"]["name"]
            for each in found["items"]
            if "deletionTimestamp" not in each["metadata"]
            and any(
                state["type"] == "Ready" and state["status"] == "True" for state in each["status"].get("conditions", ())
            )
        }

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]], *, timeout_s: float = COMMAND_S) -> Any:
        """What `holds` returns once that is true. Raises TimeoutError that says `what` is waited for."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := await holds()):  # noqa: ASYNC110 - in another process
                    await asyncio.sleep(CHECK_EVERY_S)
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}") from None
        return found


@asynccontextmanager
async def namespace(folder: Path) -> AsyncIterator[Namespace]:
    """While the context is open."""
    own = Namespace(f"test-{uuid.uuid4().hex[:8]}", folder)
    await run("kubectl", "create", "namespace", own.name)
    try:
        await run("kubectl", "label", "namespace", own.name, "pod-security.kubernetes.io/enforce=restricted")
        yield own
    finally:
        await run("kubectl", "delete", "namespace", own.name, "--wait=false")


@asynccontextmanager
async def installed(folder: Path, *options: str) -> AsyncIterator[Namespace]:
    """The chart in a namespace of its own, while the context is open."""
    async with namespace(folder) as own:
        await own.helm("install", *options)
        yield own
