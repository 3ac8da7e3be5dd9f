"""A suite under `docker compose`, with its own ports and project, for the length of a test."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

from libs.runtime.net.ports import held_port

ROOT = Path(__file__).resolve().parents[3]
UP_S = 1200
"""The bound on building images and starting; large wheels dominate it."""
COMMAND_S = 180
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Kind:
    """The names of a profile's services."""

    profile: str
    gateway: str
    prefill: str
    decode: str
    model: str


KINDS = {
    "sim": Kind("sim", "gateway-sim", "prefill-sim", "decode-sim", "sim"),
    "cpu": Kind("cpu", "gateway", "prefill", "decode", "SmolLM2-135M-Instruct"),
    "gpu": Kind("gpu", "gateway-gpu", "prefill-gpu", "decode-gpu", "SmolLM2-135M-Instruct"),
}


class ComposeCluster:
    """A cluster's control by tests: the verbs of `docker compose`, and the services' REST."""

    def __init__(self, kind: Kind, environment: Mapping[str, str], project: str, overlays: Sequence[str] = ()) -> None:
        self.kind = kind
        self.project = project
        self._environment = dict(environment)
        self._files = [word for file in ("compose.yaml", *overlays) for word in ("-f", file)] if overlays else []
        self.gateway, self.planner, self.metrics = (
            f"http://127.0.0.1:{environment[f'FULCRUM_{name}_PORT']}" for name in ("GATEWAY", "PLANNER", "METRICS")
        )

    @property
    def shell(self) -> dict[str, str]:
        """The environment in which a plain `docker compose` addresses this cluster, in any folder."""
        named = {"COMPOSE_PROJECT_NAME": self.project, "COMPOSE_FILE": str(ROOT / "compose.yaml")}
        return {**os.environ, **self._environment, **named, "COMPOSE_PROFILES": self.kind.profile}

    async def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Run one command and return its output. Fail the test with that output on an error."""
        command = (
            *("docker", "compose", "-p", self.project, *self._files, "--profile", self.kind.profile),
            *arguments,
        )
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env={**os.environ, **self._environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, f"{' '.join(command)}\n{output[-4000:]}"
        return output

    async def scale(self, service: str, count: int) -> None:
        """Scale a service to a number of containers. Those that go stop gracefully."""
        await self.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"{service}={count}", service)

    async def kill(self, service: str) -> None:
        """Kill a service's containers with SIGKILL, then start them again."""
        await self.compose("kill", "-s", "KILL", service)
        await self.compose("up", "-d", "--no-build", "--no-recreate", "--no-deps", service)

    async def upgrade(self, service: str, tag: str) -> None:
        """Replace a service's containers with those of another image, and wait until they are healthy."""
        self._environment["FULCRUM_TAG"] = tag
        await self.compose("up", "-d", "--no-build", "--no-deps", "--wait", service)

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the planner lists; none while it is away."""
        found: Any = await self._get(f"{self.planner}/v1/workers", [])
        return list(found)

    async def occupancy(self) -> dict[str, Any]:
        """Return the last two seconds of occupancy; empty while the service is away."""
        found: Any = await self._get(f"{self.metrics}/v1/occupancy?window=2s", {})
        return dict(found)

    async def _get(self, url: str, otherwise: object) -> object:
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            try:
                answer = await client.get(url)
            except httpx.TransportError:
                return otherwise
        return answer.json() if answer.is_success else otherwise


async def eventually(what: str, check: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    """Poll an async check until it is true."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if await check():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


def _ports() -> Mapping[str, str]:
    """Choose the published ports. A container that is started again must keep its port, so they are fixed beforehand.

    They are not held meanwhile, as an engine cannot share its ports.
    """
    with ExitStack() as stack:
        names = ("GATEWAY", "PLANNER", "METRICS")
        return {f"FULCRUM_{name}_PORT": str(stack.enter_context(held_port())) for name in names}


@asynccontextmanager
async def running_cluster(
    profile: str,
    *,
    overlays: Sequence[str] = (),
    before: Callable[[ComposeCluster], Awaitable[object]] | None = None,
    healthy: bool = True,
) -> AsyncIterator[ComposeCluster]:
    """Build, start, wait until all is healthy; at the end remove containers, networks and volumes.

    `overlays` names further files, and `before` runs between building and starting. Without `healthy`, do not wait.
    """
    # Roles stay, since tests of scaling count the workers of each role.
    environment = {**_ports(), "FULCRUM_TOKEN": secrets.token_hex(8), "FULCRUM_PLANNER_MODE": "advisory"}
    cluster = ComposeCluster(KINDS[profile], environment, f"fulcrum-test-{secrets.token_hex(3)}", overlays)
    try:
        if before is not None:
            await cluster.compose("build", timeout_s=UP_S)
            await before(cluster)
        await cluster.compose("up", "--build", *(("--wait",) if healthy else ()), "-d", timeout_s=UP_S)
        yield cluster
    except BaseException:
        print(await cluster.compose("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        await cluster.compose("down", "--volumes", "--remove-orphans", "--timeout", "40")


CLIENTS = 6
MAX_TOKENS = 48
PROMPTS = [f"Tell me about the number {number}." for number in range(CLIENTS)]
RETRIES = 12
"""Retries of OpenAI's library, with growing pauses; enough for a gateway to restart."""


class ComposeLoad:
    """Clients that repeat one greedy prompt, whose answer must never change."""

    def __init__(self, base_url: str, model: str) -> None:
        self._client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=RETRIES, timeout=120)
        self._model = model
        self._expected: dict[str, str] = {}
        self._streams = 0
        self._changed = asyncio.Condition()
        self.streaming = True
        """Turn off while the gateway itself is killed, since the library cannot repeat a stream."""
        self.answered = 0
        self.failed: list[str] = []

    async def ask_forever(self, prompt: str) -> None:
        """Run one client."""
        while True:
            try:
                text, tokens = await (self._stream(prompt) if self.streaming else self._whole(prompt))
            except OpenAIError as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            expected = self._expected.setdefault(prompt, text)
            if text != expected or tokens != MAX_TOKENS:
                self.failed.append(f"{tokens} tokens, {text!r} instead of {expected!r}")
            self.answered += 1
            async with self._changed:
                self._changed.notify_all()

    async def answers(self, count: int, timeout_s: float = 120) -> None:
        """Wait for `count` more answers."""
        target = self.answered + count
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.answered >= target)

    async def end_streams(self) -> None:
        """Stop streaming from now on, and wait for the streams in progress."""
        self.streaming = False
        async with self._changed:
            await self._changed.wait_for(lambda: not self._streams)

    async def close(self) -> None:
        await self._client.close()

    async def _stream(self, prompt: str) -> tuple[str, int]:
        self._streams += 1
        try:
            stream = await self._client.chat.completions.create(
                **self._request(prompt), stream=True, stream_options={"include_usage": True}
            )
            text, tokens = "", 0
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return text, tokens
        finally:
            self._streams -= 1

    async def _whole(self, prompt: str) -> tuple[str, int]:
        answer = await self._client.chat.completions.create(**self._request(prompt))
        return answer.choices[0].message.content or "", answer.usage.completion_tokens if answer.usage else 0

    def _request(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }


@asynccontextmanager
async def running_load(base_url: str, model: str) -> AsyncIterator[ComposeLoad]:
    """Run clients until the context ends."""
    load = ComposeLoad(base_url, model)
    clients = [asyncio.create_task(load.ask_forever(prompt)) for prompt in PROMPTS]
    try:
        yield load
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await load.close()
