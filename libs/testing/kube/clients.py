"""Clients of a Service, which find its pods in its EndpointSlices, as kube-proxy does."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import httpx

from libs.runtime.tasks import TaskOwner
from libs.testing.kube.namespace import CommandFailed, Namespace
from libs.testing.kube.pod_process import local_address

REFRESH_S: Final = 1.0
BUSY_S: Final = 0.2
CALL_S: Final = 120.0


@dataclass
class KubeService:
    """The addresses of a Service's ready endpoints, at most REFRESH_S old."""

    own: Namespace
    name: str
    kubeconfig: str = ""
    """The kubeconfig file; empty for that of KUBECONFIG."""
    urls: list[str] = field(default_factory=list)

    async def refresh(self) -> None:
        """Read the slices once."""
        where = ("--kubeconfig", self.kubeconfig) if self.kubeconfig else ()
        found = await self.own.get("endpointslices", *where, "--selector", f"kubernetes.io/service-name={self.name}")
        self.urls = [
            f"http://{local_address(address)}:{each['ports'][0]['port']}"
            for each in found["items"]
            for endpoint in each["endpoints"] or ()
            if endpoint["conditions"]["ready"]
            for address in endpoint["addresses"]
        ]

    async def follow(self) -> None:
        """Refresh until cancelled. While the API server is away, the last endpoints stay, as kube-proxy's do."""
        while True:
            with suppress(CommandFailed):
                await self.refresh()
            await asyncio.sleep(REFRESH_S)

    def url(self) -> str:
        """Return the URL of a random endpoint. Raise ConnectError if there is none, since kube-proxy then refuses
        connections.
        """
        if not self.urls:
            raise httpx.ConnectError(f"no endpoint of {self.name} is ready")
        return random.choice(self.urls)  # noqa: S311


@dataclass
class KubeLoad:
    """The results of the clients so far."""

    service: KubeService
    prompt: str
    max_tokens: int
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    """Every status other than 200 and 429, and every broken connection."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self, who: int) -> None:
        """Send one request after another, each over a new connection."""
        alone = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=CALL_S, limits=alone) as http:
            for number in count():
                if self.ending.is_set():
                    return
                await self._ask(http, f"{who} {number} {self.prompt}")

    async def _ask(self, http: httpx.AsyncClient, prompt: str) -> None:
        body = {"model": "sim", "prompt": prompt, "max_tokens": self.max_tokens, "ignore_eos": True}
        try:
            answer = await http.post(f"{self.service.url()}/v1/completions", json=body)
        except httpx.TransportError as error:
            self.failed.append(repr(error))
            return
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == self.max_tokens:
            self.answered += 1
        elif answer.status_code == 429:
            await asyncio.sleep(BUSY_S)
        else:
            self.failed.append(f"{answer.status_code} {answer.text[:200]}")

    async def until(self, wanted: int, timeout_s: float) -> None:
        """Wait until there have been that many answers in total."""
        async with asyncio.timeout(timeout_s):
            while self.answered < wanted:  # noqa: ASYNC110 - bounded by the timeout
                await asyncio.sleep(BUSY_S)


@asynccontextmanager
async def running_load(service: KubeService, *, clients: int, prompt: str, max_tokens: int) -> AsyncIterator[KubeLoad]:
    """Run clients while the context is open, then wait for the requests in progress."""
    load, tasks = KubeLoad(service, prompt, max_tokens), TaskOwner()
    await service.refresh()
    tasks.spawn("endpoints", service.follow())
    asking = [tasks.spawn(f"client {who}", load.client(who)) for who in range(clients)]
    try:
        yield load
        load.ending.set()
        await asyncio.gather(*asking)
        if tasks.error is not None:
            raise tasks.error
    finally:
        await tasks.close()
