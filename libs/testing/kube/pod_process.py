"""A pod of ours as a process of this machine: its command and environment, under a loopback address of its own."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from libs.launch.processes.local import GRPC_EXPERIMENTS
from libs.runtime.healthcheck import grpc_serves, http_serves

ROOT: Final = Path(__file__).resolve().parents[3]
EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - what a pod's own network namespace makes of it
Secret = Callable[[str, str], Awaitable[str]]
"""A Secret's value, by name and key."""


def local_address(pod_ip: str) -> str:
    """Where a pod of this node really listens: the server takes no loopback address for a pod's."""
    return "127." + pod_ip.partition(".")[2]


class PodProcess:
    """One container, the first. `folder` takes what its volumes would."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        pod_ip: str,
        secret: Secret,
        folder: Path,
        given: Mapping[str, str],
        *,
        sources: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`given`: environment beside what the pod says, of what a real kubelet mounts. `sources`: trees of source by
        tag of the image; this one for others."""
        self.pod = pod
        self.pod_ip = pod_ip
        self.address = local_address(pod_ip)
        self.restarts = 0
        self.started = False
        """True if it was ready once since its last start."""
        self._secret = secret
        self._folder = folder
        self._given = given
        self._source = sources.get(str(self.container["image"]).rpartition(":")[2], ROOT)
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def container(self) -> Mapping[str, Any]:
        """As the pod describes it."""
        found: Mapping[str, Any] = self.pod["spec"]["containers"][0]
        return found

    @property
    def runs(self) -> bool:
        """True if the process does."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """A new process; what it prints goes to a file of the folder."""
        python, *words = self.container["command"]
        assert python == "python", "only images of ours are played"
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = await self._environment()
        if self._stopping.is_set():
            return
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *words, env=environment, stdout=log, stderr=log, cwd=self._folder
            )
        self.started = False
        if self._stopping.is_set():  # while it began
            self.kill()

    async def wait(self) -> None:
        """Until it has ended."""
        if self._process is not None:
            await self._process.wait()

    async def ready(self) -> bool:
        """What its readiness probe says."""
        probe = self.container["readinessProbe"]
        if not self.runs:
            return False
        if "grpc" in probe:
            serves = await asyncio.to_thread(grpc_serves, f"{self.address}:{probe['grpc']['port']}")
        else:
            ports = {each["name"]: each["containerPort"] for each in self.container["ports"]}
            path, port = probe["httpGet"]["path"], ports[probe["httpGet"]["port"]]
            serves = await asyncio.to_thread(http_serves, urlsplit(f"http://{self.address}:{port}{path}"))
        self.started = self.started or serves
        return serves

    async def stop(self) -> None:
        """As a kubelet ends it: preStop, SIGTERM, and SIGKILL when the grace period is over."""
        self._stopping.set()
        grace_s = float(self.pod["spec"]["terminationGracePeriodSeconds"])
        try:
            async with asyncio.timeout(grace_s):
                pause = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
                await asyncio.sleep(pause.get("seconds", 0))
                self._signal(signal.SIGTERM)
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """At once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _environment(self) -> dict[str, str]:
        mounts = [each["mountPath"] for each in self.container.get("volumeMounts", ())]
        found = {
            "PATH": os.environ["PATH"], "HOME": str(self._folder), "PYTHONPATH": str(self._source),
            "GRPC_EXPERIMENTS": GRPC_EXPERIMENTS, **self._given,
        }  # fmt: skip
        for each in self.container["env"]:
            value = each["value"] if "value" in each else await self._value_from(each["valueFrom"])
            if value == EVERYWHERE:
                value = self.address
            elif any(value.startswith(f"{mount}/") or value == mount for mount in mounts):
                folder = self._folder / value.lstrip("/")
                folder.parent.mkdir(parents=True, exist_ok=True)
                value = str(folder)
            found[each["name"]] = value
        return found

    async def _value_from(self, source: Mapping[str, Any]) -> str:
        if "secretKeyRef" in source:
            return await self._secret(source["secretKeyRef"]["name"], source["secretKeyRef"]["key"])
        fields = {
            "metadata.name": self.pod["metadata"]["name"],
            "spec.nodeName": self.pod["spec"]["nodeName"],
            "status.podIP": self.address,
        }
        return str(fields[source["fieldRef"]["fieldPath"]])
