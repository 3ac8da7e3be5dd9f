"""A trace over HTTP in real time: an open loop of streams, each answered by a whole suite of processes."""

import asyncio
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf import json_format

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import StepTime
from libs.lab.experiment import DEFAULT_BLOCK_TOKENS
from libs.lab.traces.request import Trace
from libs.perfmodel.learner import StepKind, combine
from libs.perfmodel.wire import fitted_model
from libs.policy.roles import Role
from libs.policy.step_time import StepTimeModel
from load.gateway.http_load import WrongAnswer
from load.lab.fidelity import LIVE, ClusterShape, Replay, Served, live_trace

# Before the first request, to build everything that is sent.
LEAD_S = 1.0
ANSWER_S = 120.0
READ_BYTES = 65_536
REFUSED = b" 429 "
# The status line of an answer begins in so many bytes.
HEAD_BYTES = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request, and what its client measured."""

    served: Served
    client_ttft_ns: float
    late_ns: float
    """The delay of sending after the due time of the request."""
    number: int
    begun_ns: int
    """The beginning of the trace on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    link: str
    seconds: float
    seed: int
    replay: Replay
    load_before: float
    """Load average of the machine before the run."""
    load_after: float

    @property
    def trace(self) -> Trace:
        return live_trace(LIVE[self.link], self.seconds, self.seed)


def settings(place: ClusterShape, trace: Trace) -> dict[str, str]:
    """Return settings of a suite of this composition, its engine aside."""
    return {
        "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": str(place.chunk_tokens),
        "FULCRUM_WORKER_MAX_SEQUENCES": str(place.max_sequences),
        "FULCRUM_WORKER_BLOCK_SIZE_TOKENS": str(trace.block_tokens or DEFAULT_BLOCK_TOKENS),
        "FULCRUM_WORKER_THREADS": "1",
        "FULCRUM_WORKER_KV_MEMORY_MB": str(place.profile.kv_memory_bytes // 2**20),
        "FULCRUM_LOG_LEVEL": "warning",
    }


def sim_settings(place: ClusterShape) -> dict[str, str]:
    return {
        "FULCRUM_WORKER_SIM_PROFILE": place.profile.name,
        "FULCRUM_WORKER_SIM_LINK_GBPS": str(place.link_gbps),
        "FULCRUM_WORKER_SIM_KV_MEMORY_MB": str(place.profile.kv_memory_bytes // 2**20),
    }


def learned_steps(folder: Path, prior: StepTimeModel) -> StepTimeModel:
    """Return the step times that workers of one kind have left in a cache folder."""
    found = {
        kind: fitted_model(json_format.Parse(path.read_text(), StepTime()))
        for kind in StepKind
        for path in (folder / "step-times").rglob(f"{kind.value}.json")
    }
    return combine(prior, {kind: fit for kind, fit in found.items() if fit is not None})


def live_replay(url: str, model: str, place: ClusterShape, trace: Trace, prompts: Sequence[Sequence[int]]) -> Replay:
    """Send each request at its time; those refused for lack of room are left out. Raise WrongAnswer on others."""
    answers = asyncio.run(play(url, model, trace, prompts))
    names = _names(place, [each.served for each in answers.values()])
    served = {
        number: Served(
            each.served.arrival_ns,
            each.served.ttft_ns,
            each.served.tpot_ns,
            names[each.served.prefill_worker],
            names.get(each.served.decode_worker, ""),
            each.served.cached_tokens,
        )
        for number, each in answers.items()
    }
    late_ns = max(each.late_ns for each in answers.values())
    return Replay(served, 0, {number: each.client_ttft_ns for number, each in answers.items()}, late_ns)


def _names(place: ClusterShape, served: Sequence[Served]) -> Mapping[str, str]:
    """Map workers' own names to the lab's, in alphabetical order within a role."""
    prefill = sum(role is Role.PREFILL for role, _ in place.roles)
    first = sorted({each.prefill_worker for each in served})
    later = sorted({each.decode_worker for each in served if each.decode_worker} - set(first))
    return {name: f"w{place}" for place, name in enumerate(first)} | {
        name: f"w{prefill + place}" for place, name in enumerate(later)
    }


async def play(
    url: str, model: str, trace: Trace, prompts: Sequence[Sequence[int]], failed: list[str] | None = None
) -> dict[int, Answer]:
    """Send each request at its time. Failures are appended to `failed` if it is given; otherwise WrongAnswer is
    raised.
    """
    gc.collect()
    where = urlsplit(url)
    host, port = str(where.hostname), int(where.port or 80)
    requests = [
        _request(model, prompt, each.output_tokens) for prompt, each in zip(prompts, trace.requests, strict=True)
    ]
    start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
    answers: dict[int, Answer] = {}

    async def ask(place: int) -> None:
        try:
            await ask_one(place)
        except (WrongAnswer, OSError, TimeoutError) as error:
            if failed is None:
                raise
            failed.append(repr(error)[:500])

    async def ask_one(place: int) -> None:
        each = trace.requests[place]
        due_ns = start_ns + each.arrival_ns
        await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                sent_ns = time.monotonic_ns()
                writer.write(requests[place])
                body, first_ns = await _read(reader)
            finally:
                writer.close()
        if REFUSED in body[:HEAD_BYTES]:
            return  # `Comparison.failed` counts it
        found = _served(body, sent_ns - start_ns, each.output_tokens)
        answers[each.number] = Answer(found, first_ns - sent_ns, sent_ns - due_ns, place, start_ns)

    gc.disable()  # a pause of the client would be measured as the server's
    try:
        await asyncio.gather(*(ask(place) for place in range(len(requests))))
    finally:
        gc.enable()
    return answers


def _request(model: str, prompt: Sequence[int], tokens: int) -> bytes:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    encoded = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"x-fulcrum-details: 1\r\ncontent-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """Return the whole answer, and when its first piece arrived."""
    parts, first_ns = bytearray(), 0
    while data := await reader.read(READ_BYTES):
        parts += data
        if not first_ns and b"data: {" in parts:
            first_ns = time.monotonic_ns()
    return bytes(parts), first_ns


def _served(body: bytes, arrival_ns: int, tokens: int) -> Served:
    values = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    details = next((value["fulcrum"] for value in reversed(values) if value.get("fulcrum")), None)
    usage = next((value["usage"] for value in reversed(values) if value.get("usage")), None)
    if details is None or usage is None or usage["completion_tokens"] != tokens:
        raise WrongAnswer(f"not {tokens} tokens: {body[:300]!r} ... {body[-700:]!r}")
    return Served(
        arrival_ns,
        details["ttft_ms"] * 1e6,
        (details["tpot_ms"] or 0.0) * 1e6,
        details["prefill_worker"],
        details["decode_worker"] or "",
        usage["prompt_tokens_details"]["cached_tokens"],
    )
