"""A pod of the chart as a process of this machine: its command and environment, at a loopback address of its own."""

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
"""Returns a Secret's value, by name and key."""


def local_address(pod_ip: str) -> str:
    """Return the address at which a pod really listens: the server accepts no loopback address for a pod."""
    return "127." + pod_ip.partition(".")[2]


class PodProcess:
    """The first container of a pod, as a process. `folder` stands for its volumes."""

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
        """`given` is environment in addition to the pod's, for what a real kubelet mounts. `sources` has trees of
        source by image tag; other tags use this tree.
        """
        self.pod = pod
        self.pod_ip = pod_ip
        self.address = local_address(pod_ip)
        self.restarts = 0
        self.started = False
        """True if it has been ready since its last start."""
        self._secret = secret
        self._folder = folder
        self._given = given
        self._source = sources.get(str(self.container["image"]).rpartition(":")[2], ROOT)
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def container(self) -> Mapping[str, Any]:
        """The container as the pod describes it."""
        found: Mapping[str, Any] = self.pod["spec"]["containers"][0]
        return found

    @property
    def runs(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a new process, whose output goes to a file in the folder."""
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
        if self._stopping.is_set():  # `stop` was called during the start
            self.kill()

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            await self._process.wait()

    async def ready(self) -> bool:
        """Return the result of its readiness probe."""
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
        """End it as a kubelet does: preStop, SIGTERM, and SIGKILL once the grace period is over."""
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
