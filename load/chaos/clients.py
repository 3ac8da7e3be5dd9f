"""Clients over simulated HTTP: their requests, the expected answers, and the comparison of both."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from libs.engine.port import SamplingParams
from libs.engine.runner import Chunk
from libs.engine.sim_tokens import TokenSource
from load.chaos.loop import Node
from load.chaos.net import CUT, EOF, KEEPALIVE, REFUSED, RESET, Net, Pipe

MAX_CHUNKS = 4096
# The errors that a client may get: the queue is full, or there is no worker.
ALLOWED = {(429, "queue_full"), (503, "no_workers")}
# The reasons why a connection may break without a fault of the gateway.
NETWORK = {CUT, RESET, REFUSED}


@dataclass(frozen=True, slots=True)
class ClientCall:
    number: int
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    temperature: float
    seed: int
    n: int
    stream: bool
    stop: str
    leaves_after_s: float | None
    """The seconds after which the client closes its connection; None if it stays."""
    model: str = "sim"

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model, "prompt": list(self.prompt), "max_tokens": self.max_tokens,
            "temperature": self.temperature, "seed": self.seed, "n": self.n, "stream": self.stream,
        }  # fmt: skip
        if self.stop:
            fields["stop"] = [self.stop]
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields).encode()

    def expected(self, index: int) -> tuple[str, str]:
        """Return the text and finish reason of one choice from an engine without faults."""
        text = undisturbed(self.prompt, self.max_tokens, self.temperature, self.seed + index)
        place = text.find(self.stop) if self.stop else -1
        return (text[:place], "stop") if place >= 0 else (text, "length")

    def expected_tokens(self, index: int) -> int:
        """Return the completion tokens that usage must count, up to the one that ended the text."""
        text = undisturbed(self.prompt, self.max_tokens, self.temperature, self.seed + index)
        place = text.find(self.stop) if self.stop else -1
        return place + len(self.stop) if place >= 0 else self.max_tokens


@cache
def _source() -> TokenSource:
    return TokenSource.builtin()


def undisturbed(prompt: tuple[int, ...], count: int, temperature: float, seed: int) -> str:
    """Return the sim engine's answer, one byte a token, if nothing goes wrong."""
    history = list(prompt)
    sampling = SamplingParams(temperature=temperature, seed=seed)
    blocks = np.zeros(0, dtype=np.int32)
    for _ in range(count):
        tokens = np.array(history, dtype=np.int32)
        chunk = Chunk(0, tokens[-1:], len(history) - 1, blocks, True, sampling, tokens, len(prompt))
        history.append(_source().sample(chunk).token_id)
    return bytes(history[len(prompt) :]).decode()


def draw(number: int, random: Random) -> ClientCall:
    """Draw a request like those of users: shared prefixes, short and long prompts, greedy and sampled."""
    opening = [97 + place % 26 for place in range(random.choice((0, 16, 64, 160)))]
    prompt = (*opening, *(random.randrange(97, 123) for _ in range(1 + int(random.expovariate(1 / 40)))))
    tokens = random.choice((1, 2, 1 + int(random.expovariate(1 / 12))))
    return ClientCall(
        number=number,
        prompt=prompt[:600],
        max_tokens=min(max(tokens, 1), 60),
        temperature=random.choice((0.0, 0.8)),
        seed=random.randrange(2**31),
        n=2 if random.random() < 0.05 else 1,
        stream=random.random() < 0.7,
        stop=random.choice(("a ", "e", "o")) if random.random() < 0.1 else "",
        leaves_after_s=random.expovariate(1 / 0.2) if random.random() < 0.08 else None,
    )


@dataclass(slots=True)
class Outcome:
    ask: ClientCall
    gateway: Node
    status: int = 0
    body: bytes = b""
    broken: str = ""
    """The reason why the connection broke; empty if it did not."""
    left: bool = False
    """True if the client closed the connection itself."""
    requested_s: float = 0.0
    came_s: list[float] = field(default_factory=list)
    """The loop times at which parts of the answer arrived."""

    @property
    def kind(self) -> str:
        if self.left:
            return "left"
        if self.broken:
            return "broken"
        return "ok" if self.status == 200 and not self.error else f"{self.status} {self.error}"

    @property
    def longest_wait_s(self) -> float:
        """The longest wait for a part of the answer, including the first part."""
        return max(later - sooner for sooner, later in pairwise((self.requested_s, *self.came_s)))

    @property
    def error(self) -> str:
        """The error's code, from the status or the stream; empty without an error."""
        for value in _values(self.body):
            if "error" in value:
                return str(value["error"]["code"])
        return ""


def _values(body: bytes) -> list[dict[str, Any]]:
    if body.startswith(b"data: "):
        lines = [line[6:] for line in body.split(b"\n\n") if line]
        return [json.loads(line) for line in lines if line != b"[DONE]"]
    return [json.loads(body)] if body else []


def check(outcome: Outcome) -> list[str]:
    """Return the faults of an answer that was received to its end."""
    ask, body = outcome.ask, outcome.body
    if outcome.left:
        return []
    if outcome.broken:
        return [] if outcome.broken in NETWORK else [f"its connection broke: {outcome.broken}"]
    if outcome.error or outcome.status != 200:
        return [] if (outcome.status, outcome.error) in ALLOWED else [f"answered {outcome.kind}"]
    values = _values(body)
    wrong = []
    if ask.stream and (not body.endswith(b"data: [DONE]\n\n") or body.count(b"[DONE]") != 1):
        wrong.append("its stream did not end once")
    usage = [value["usage"] for value in values if value.get("usage")]
    wanted = sum(ask.expected_tokens(index) for index in range(ask.n))
    if len(usage) != 1 or (usage[0]["prompt_tokens"], usage[0]["completion_tokens"]) != (len(ask.prompt), wanted):
        wrong.append(f"usage {usage}, not {len(ask.prompt)} + {wanted}")
    for index in range(ask.n):
        parts = [c for value in values for c in value["choices"] if c["index"] == index]
        text = "".join(part["text"] for part in parts)
        reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
        if (text, reasons) != (ask.expected(index)[0], [ask.expected(index)[1]]):
            wrong.append(f"choice {index} said {text!r} {reasons}, not {ask.expected(index)}")
    return wrong


async def send(
    net: Net, client: Node, gateway: str, ask: ClientCall, came: Callable[[bytes], None] | None = None
) -> Outcome | None:
    """Send one request over HTTP, and return its outcome; None if nothing listens at the address.

    `came` is called with each part of the answer.
    """
    found = net.apps.get(gateway)
    if found is None:
        return None
    node, app = found
    outcome = Outcome(ask, node, requested_s=net.loop.time())
    exchange = _Exchange(net, client, node, ask)
    net.loop.after(net.delay_s(client, node), exchange.start, app)
    try:
        async with asyncio.timeout(ask.leaves_after_s):
            await _receive(exchange.down, outcome, came)
    except TimeoutError:
        outcome.left = True
        net.loop.after(net.delay_s(client, node), exchange.leave)
    except asyncio.CancelledError:
        net.loop.after(net.delay_s(client, node), exchange.leave)
        raise
    return outcome


async def _receive(down: Pipe, outcome: Outcome, came: Callable[[bytes], None] | None) -> None:
    parts: list[bytes] = []
    while isinstance(item := await down.read(), bytes):
        parts.append(item)
        outcome.came_s.append(asyncio.get_running_loop().time())
        if came is not None:
            came(item)
        if len(parts) > MAX_CHUNKS:
            raise AssertionError("an answer without end")
    outcome.broken = "" if item is EOF else str(item)
    whole = b"".join(parts)
    outcome.status, outcome.body = int(whole[:3] or 0), whole[3:]


class _Exchange:
    """The server's end of one request. It calls the ASGI app on the gateway's node, as uvicorn does."""

    def __init__(self, net: Net, client: Node, gateway: Node, ask: ClientCall) -> None:
        self._net, self._gateway, self._ask = net, gateway, ask
        self.down = Pipe(net, f"http {ask.number}", gateway, client)
        self._gone = asyncio.Event()
        self._sent_body = False
        self._ended = False
        net.calls[self] = None
        self.client, self.server = client, gateway

    def start(self, app: Any) -> None:
        if self._gateway.dead:
            self.broken(REFUSED)
        elif self.down.ended is None:
            self._net.loop.spawn(self._gateway, self._run(app))

    def leave(self) -> None:
        self._net.calls.pop(self, None)
        self.down.end(EOF)
        self._gone.set()

    def broken(self, why: str) -> None:
        """Close both ends. A failed gRPC keepalive is ignored, since this is HTTP."""
        if why == KEEPALIVE:
            return
        self._net.calls.pop(self, None)
        self.down.end(why)
        self._gone.set()

    async def _run(self, app: Any) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"request-%d" % self._ask.number)],
            "client": ("client", 1), "server": ("gateway", 80),
        }  # fmt: skip
        try:
            await app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            self.broken("the gateway dropped it")
        except Exception as error:
            self._net.faults.append(f"{self._gateway}: request {self._ask.number} raised {error!r}")
            self.broken("the gateway failed")
        if not self._ended:
            self.broken("the answer was not ended")

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._ask.body(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.down.ended is not None:
            return
        if message["type"] == "http.response.start":
            await self.down.write(b"%03d" % message["status"])
            return
        await self.down.write(message.get("body", b""))
        if not message.get("more_body", False):
            self._ended = True
            self._gone.set()
            self._net.calls.pop(self, None)
            self.down.send(EOF)
