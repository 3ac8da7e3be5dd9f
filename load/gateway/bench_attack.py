"""Attack a suite as one tenant while another is served, and measure the share of the other's answers that are in time.

The suite is complete, with the sim engine, keys and limits (`--open`: without keys). A modest tenant sends requests at
even intervals, and one attack at a time runs from another address. The bench prints a table, then one JSON line.
"""

import asyncio
import contextlib
import json
import resource
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import cycle, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from libs.filestore.port import FileInfo
from libs.testing.suites.suite import RunningSuite
from libs.testing.workers.mortal import PROMPT_MARK, mortal_env
from load.gateway.inside_attacks import CountAnswer, Inside, forged_frames, redis_values, topic_extremes, topic_values
from load.measure import bench_parser, spawned
from load.setup import bench_suite

ATTACKER_ADDRESS: Final = "127.0.0.2"
# The modest tenant's requests a second.
RATE_RPS: Final = 5.0
# The limit for the modest tenant's whole answer, which takes a tenth of it without load.
IN_TIME_S: Final = 2.0
TOKENS: Final = 16
# The attacker's limits, as an operator would set them for any tenant.
LIMITS: Final = ("--requests", "600", "--tokens", "60000", "--concurrent", "16")
# The time for which an attacker waits for an answer.
ANSWER_S: Final = 10.0
CONNECTIONS: Final = 10_000
# The upper bound of repetitions in one loop of an attack.
MAX_TRIES: Final = 200_000
JSON: Final = {"content-type": "application/json"}

Attack = Callable[["Target"], Awaitable[None]]


@dataclass
class Target:
    """The gateway as the attacker sees it."""

    host: str
    port: int
    headers: Mapping[str, str]
    statuses: dict[str, int] = field(default_factory=dict)
    victim_file: str = ""
    inside: Inside | None = None

    def saw(self, status: object) -> None:
        """Count an answer by its status, or by the error in its place."""
        name = str(status)
        self.statuses[name] = self.statuses.get(name, 0) + 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, local_addr=(ATTACKER_ADDRESS, 0))

    def head(self, path: str = "/v1/completions", **more: str) -> bytes:
        """Return the request line and headers of a POST request."""
        lines = {"host": f"{self.host}:{self.port}", "content-type": "application/json", **self.headers, **more}
        return "\r\n".join([f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]).encode()

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=ATTACKER_ADDRESS)
        return httpx.AsyncClient(
            base_url=f"http://{self.host}:{self.port}", headers=dict(self.headers), transport=transport, timeout=30
        )


def body(**more: Any) -> dict[str, Any]:
    """Return the body of one of the attacker's requests."""
    return {"model": "sim", "prompt": "attack", "max_tokens": 512, "ignore_eos": True, **more}


async def many(count: int, one: Callable[[], Awaitable[None]]) -> None:
    """Repeat `one` in `count` concurrent loops, at most `MAX_TRIES` times each."""

    async def forever() -> None:
        for _ in range(MAX_TRIES):
            with contextlib.suppress(OSError, httpx.HTTPError, asyncio.IncompleteReadError):
                await one()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(forever())


async def connections(target: Target) -> None:
    """Open thousands of connections that send nothing."""
    held = []
    for _ in range(CONNECTIONS):
        try:
            held.append(await target.connect())
            target.saw("connected")
        except OSError as error:
            target.saw(type(error).__name__)
    await asyncio.Event().wait()


async def slow_writers(target: Target) -> None:
    """Send headers one byte at a time."""

    async def one() -> None:
        _, writer = await target.connect()
        for byte in target.head():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.5)
        writer.close()

    await many(500, one)


async def slow_readers(target: Target) -> None:
    async def one() -> None:
        sent = json.dumps(body(stream=True, max_tokens=4000)).encode()
        reader, writer = await target.connect()
        writer.write(target.head(**{"content-length": str(len(sent))}) + b"\r\n\r\n" + sent)
        target.saw((await reader.readline()).split(b" ")[1:2])
        await asyncio.sleep(60)

    await many(200, one)


async def huge(target: Target) -> None:
    """Send headers of a megabyte and bodies of a gigabyte."""

    async def one() -> None:
        for sent in (
            target.head(**{"x-big": "a" * 1_000_000}) + b"\r\n\r\n",
            target.head(**{"content-length": str(10**9)}) + b"\r\n\r\n" + b"a" * 10_000_000,
        ):
            reader, writer = await target.connect()
            writer.write(sent)
            async with asyncio.timeout(ANSWER_S):  # `wait_for` may swallow a cancellation
                target.saw((await reader.readline()).split(b" ")[1:2])
            writer.transport.abort()

    await many(8, one)


async def pipelined(target: Target) -> None:
    """Send a thousand requests on one connection before any is answered."""

    async def one() -> None:
        sent = json.dumps(body()).encode()
        reader, writer = await target.connect()
        writer.write((target.head(**{"content-length": str(len(sent))}) + b"\r\n\r\n" + sent) * 1000)
        async with asyncio.timeout(ANSWER_S):
            target.saw((await reader.readline()).split(b" ")[1:2])
            await reader.read()
        writer.transport.abort()

    await many(8, one)


Sent = dict[str, Any]
"""A request as the arguments of httpx's `request`."""


def post(path: str = "/v1/completions", **more: Any) -> Sent:
    return {"method": "POST", "url": path, **more}


def asks(count: int, make: Callable[[Target], Iterable[Sent]]) -> Attack:
    """Return an attack by `count` clients that send the requests of `make` without a pause."""

    async def attack(target: Target) -> None:
        requests = iter(make(target))
        async with target.client() as http:

            async def one() -> None:
                target.saw((await http.request(**next(requests))).status_code)

            await many(count, one)

    return attack


def completions(**fields: Any) -> Callable[[Target], Iterable[Sent]]:
    return lambda _: repeat(post(json=body(**fields)))


def nonsense(_: Target) -> Iterable[Sent]:
    """Return bodies that are no valid requests: deeply nested, truncated, or with wrong types."""
    deep = "[" * 100_000 + "]" * 100_000
    bodies = (deep, '{"model": "sim"', '{"model": 7, "prompt": {}}', '{"prompt": "\\ud800"}', "\0" * 1000)
    return cycle(post(content=each, headers=JSON) for each in bodies)


def others_things(target: Target) -> Iterable[Sent]:
    """Return every kind of request that could reach the modest tenant's file by its id."""
    path = f"/v1/files/{target.victim_file}"
    named = {"input_file_id": target.victim_file, "endpoint": "/v1/completions", "completion_window": "24h"}
    reads = {"method": "GET", "url": f"{path}/content"}
    return cycle((reads, {"method": "DELETE", "url": path}, post("/v1/batches", json=named)))


def guesses(_: Target) -> Iterable[Sent]:
    keys = (f"Bearer sk-fulcrum-{number:043d}" for number in range(10**9))
    return (post(json=body(), headers={"authorization": key}) for key in keys)


def from_inside(attack: Callable[[Inside, CountAnswer], Awaitable[None]]) -> Attack:
    """Return an attack on the suite's inner ports."""

    async def attacks(target: Target) -> None:
        assert target.inside is not None
        await attack(target.inside, target.saw)

    return attacks


async def slow_uploads(target: Target) -> None:
    """Upload files at two bytes a second."""

    async def one() -> None:
        reader, writer = await target.connect()
        form = {"content-type": "multipart/form-data; boundary=x", "content-length": "1000000"}
        head = b'\r\n\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        writer.write(target.head("/v1/files", **form) + head)
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b"--")
            await asyncio.wait([answer], timeout=1.0)
        target.saw((await answer).split(b" ")[1:2])
        writer.transport.abort()

    await many(16, one)


def many_files(_: Target) -> Iterable[Sent]:
    return repeat(post("/v1/files", files={"purpose": (None, "batch"), "file": ("f", b"{}")}))


def lists(_: Target) -> Iterable[Sent]:
    """Return requests for a list of the tenant's own files, of which there is the maximum number."""
    return repeat({"method": "GET", "url": "/v1/files", "params": {"limit": 20}})


def too_long(_: Target) -> Iterable[Sent]:
    """Return chats with 443 KiB of tools, which exceed the model's context."""
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 4_500}}
    sent = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "tools": [tool] * 100})
    return repeat(post("/v1/chat/completions", content=sent, headers=JSON))


ATTACKS: Final[Mapping[str, Attack]] = {
    "10,000 connections": connections,
    "500 slow writers": slow_writers,
    "200 slow readers": slow_readers,
    "huge headers and bodies": huge,
    "1,000 requests pipelined": pipelined,
    "128 choices, 16 clients": asks(16, completions(n=128)),
    "200 clients at once": asks(200, completions()),
    "nonsense": asks(8, nonsense),
    "another tenant's ids": asks(4, others_things),
    "guessed keys": asks(16, guesses),
    "forged frames and handles": from_inside(forged_frames),
    "values in topics": from_inside(topic_values),
    "extremes in topics": from_inside(topic_extremes),
    "values in Redis": from_inside(redis_values),
    "16 slow uploads": slow_uploads,
    "10,000 files": asks(16, many_files),
    "lists beside 9,990 files": asks(4, lists),
    "tools of 443 KiB": asks(8, too_long),
    "a prompt that kills workers": asks(4, completions(prompt=PROMPT_MARK, max_tokens=TOKENS)),
}


OF_FILES: Final = {"16 slow uploads", "10,000 files", "lists beside 9,990 files"}
"""The attacks on files. During these, the modest tenant also uploads, lists and deletes files."""
# The time for a gateway to recover from a burst.
SETTLE_S: Final = 12.0


def fill(folder: Path) -> None:
    """Create files of five tenants, including the attacker, in a gateway's folder, and record them in its journal."""
    names = [f"file-{number:05}" for number in range(9_990)]
    for number, name in enumerate(names):
        home = folder / name
        home.mkdir(mode=0o700)
        info = FileInfo(home.name, "f", "batch", 2, 1, tenant=f"t{number % 5}" if number % 5 else "attacker")
        (home / "info.json").write_bytes(msgspec.json.encode(info))
    with (folder / ".changes").open("a") as journal:
        journal.write("\n".join(names) + "\n")


async def resident_mib(suite: RunningSuite) -> int:
    """Return the resident memory of the gateway in MiB."""
    headers = {"authorization": f"Bearer {suite.ready['token']}"}
    async with httpx.AsyncClient(headers=headers) as http:
        text = (await http.get(f"{suite.gateway}/metrics")).text
    size = next(line for line in text.splitlines() if line.startswith("process_resident_memory_bytes "))
    return round(float(size.split()[1]) / 2**20)


def attack_until_stopped(name: str, target: Target, news: Connection) -> None:
    """Attack until a message arrives, then send the number of answers by status. A first message reports the start.

    This runs in its own process, so that the attacker's clients do not share an event loop with the other tenant's.
    """

    async def until_ended() -> None:
        attacking = asyncio.ensure_future(ATTACKS[name](target))
        news.send("begins")
        await asyncio.to_thread(news.recv)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)

    asyncio.run(until_ended())
    news.send(target.statuses)


@dataclass
class TenantOutcome:
    """The outcome of the modest tenant's requests."""

    goodput: float = 0.0
    """The share of requests answered in time."""
    late_until_s: float = 0.0
    """The seconds from the first request to the last late one; 0 if none was late."""
    unanswered: int = 0
    """The number of requests that were refused, failed or not answered within 10 s."""


async def work_on_file(http: httpx.AsyncClient) -> bool:
    """Upload, list and delete a file. Return whether all of it succeeded."""
    form: Any = {"purpose": (None, "batch"), "file": ("f", b"{}")}
    made = await http.post("/v1/files", files=form)
    if made.status_code != 200:
        return False
    listed = await http.get("/v1/files", params={"limit": 20})
    gone = await http.delete(f"/v1/files/{made.json()['id']}")
    return (listed.status_code, gone.status_code) == (200, 200)


async def serve(
    suite: RunningSuite, headers: Mapping[str, str], seconds: float, *, files: bool = False
) -> TenantOutcome:
    """Send requests as the modest tenant does. With `files`, each completion follows work on a file."""
    served, good, count, first_s = TenantOutcome(), 0, round(RATE_RPS * seconds), time.perf_counter()

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal good
        began_s, answered = time.perf_counter(), False
        with contextlib.suppress(httpx.HTTPError):
            sent = {"model": "sim", "prompt": "hello", "max_tokens": TOKENS}
            stored = not files or await work_on_file(http)
            answered = stored and (await http.post("/v1/completions", json=sent)).status_code == 200
        if answered and time.perf_counter() - began_s <= IN_TIME_S:
            good += 1
        else:
            served.late_until_s = max(served.late_until_s, round(began_s - first_s, 1))
        served.unanswered += not answered

    async with (
        httpx.AsyncClient(base_url=suite.gateway, headers=dict(headers), timeout=10) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(count):
            group.create_task(one(http))
            await asyncio.sleep(1 / RATE_RPS)
    served.goodput = good / count
    return served


def killed(log: Path) -> int:
    """Return the number of the suite's processes that have been killed so far."""
    return log.read_text().count(f"died (signal {signal.SIGKILL.name}")


async def attacked(
    suite: RunningSuite, keys: Mapping[str, str], seconds: float, only: str, log: Path
) -> dict[str, dict[str, Any]]:
    """Measure the modest tenant alone, then under each attack from its first moment on. `log` is the suite's log."""
    headers = {name: {"authorization": f"Bearer {key}"} if key else {} for name, key in keys.items()}
    parts = urlsplit(suite.gateway)
    async with httpx.AsyncClient(base_url=suite.gateway, headers=headers["modest"]) as http:
        line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
        made = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": line})
    found: dict[str, dict[str, Any]] = {"none": asdict(await serve(suite, headers["modest"], seconds))}
    if any(only in name for name in OF_FILES):
        found["none, with files"] = asdict(await serve(suite, headers["modest"], seconds, files=True))
        print(f"{'none, with files':28} goodput {found['none, with files']['goodput']:.3f}", flush=True)
    for name in (name for name in ATTACKS if only in name):
        target = Target(
            str(parts.hostname), int(parts.port or 0), headers["attacker"], victim_file=made.json()["id"],
            inside=Inside(suite.ready["kafka"], suite.ready["redis"], suite.ready["cluster"]),
        )  # fmt: skip
        if name.startswith("lists"):
            await asyncio.to_thread(fill, log.parent / "files")
        before, mib = killed(log), [await resident_mib(suite)]
        with spawned(attack_until_stopped, name, target) as news:
            news.recv()  # the attack begins
            served = await serve(suite, headers["modest"], seconds, files=name in OF_FILES)
            news.send("end")
            answers: dict[str, int] = news.recv()
        mib.append(await resident_mib(suite))
        if name == "tools of 443 KiB":
            await asyncio.sleep(SETTLE_S)
            mib.append(await resident_mib(suite))
            print(f"{'':28} the gateway has {mib[0]} MiB before, {mib[1]} at the end, {mib[2]} a moment later")
        dead = killed(log) - before
        found[name] = {**asdict(served), "killed": dead, "answers": answers, "gateway_mib": mib}
        late = f", late until {served.late_until_s} s, {served.unanswered} unanswered" if served.goodput < 1 else ""
        dead_too = f", {dead} killed" if dead else ""
        print(f"{name:28} goodput {served.goodput:.3f}{late}{dead_too}   {answers}", flush=True)
        await asyncio.sleep(2.0)
    return found


def main() -> None:
    arguments = bench_parser(
        __doc__, open=(False, "without keys and limits"),
        no_limits=(False, "with keys, and no limits of the attacker's"),
        seconds=(6.0, "of each attack"), prefill=(3, "workers; a prompt that kills takes two of them"),
        only=("", "attacks with this in their name"),
    ).parse_args()  # fmt: skip
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        files = {"FULCRUM_GATEWAY_FILES_FOLDER": f"{folder}/files", "FULCRUM_GATEWAY_FILES_MAX_COUNT": "20000"}
        env = mortal_env(Path(folder)) | files
        shape = ("--prefill", str(arguments.prefill), "--decode", "2")
        with bench_suite("--engine", "sim", *shape, env=env, folder=Path(folder)) as suite:
            keys = {"modest": "", "attacker": ""}
            if not arguments.open:
                for tenant in keys:
                    keys[tenant] = json.loads(suite.fulcrum("keys", "create", "--tenant", tenant, "--json").stdout)[
                        "key"
                    ]
                if not arguments.no_limits:
                    suite.fulcrum("keys", "limits", "attacker", *LIMITS)
                time.sleep(2.5)  # services notice the first key within this time
            found = asyncio.run(attacked(suite, keys, arguments.seconds, arguments.only, Path(folder) / "up.log"))
    print(json.dumps({"open": arguments.open, "limits": not (arguments.open or arguments.no_limits), **found}))


if __name__ == "__main__":
    main()
