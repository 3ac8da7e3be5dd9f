"""Compare the predicted with the measured TTFT of prompts with images, on two torch prefill workers of one process.

The model has random weights, and its vision tower takes most of a prompt's time. To compare two checkouts, run the
bench in both with the same `--model` folder. It prints one JSON object.
"""

import argparse
import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import RequestEvent
from libs.runtime.clock import SystemClock
from libs.runtime.http import bind
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex import PrefixQuery
from libs.testing.engines.vision_model import picture, write_random_llava
from libs.testing.servers.listed_registry import ListedRegistry
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingBus, RecordingKvIndex, local_worker
from services.gateway.request.prompt import load_catalog
from services.gateway.run import GatewayPorts, open_gateway
from services.gateway.settings import GatewaySettings

TOWER: Final[dict[str, Any]] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip
REPEATED: Final = 4
"""One request in this many repeats the image of an earlier one."""
WARM_UP: Final = 6


class EmptyKvIndex(RecordingKvIndex):
    """An index without any prefix, since each prompt differs from its start on."""

    async def longest_prefix(self, queries: Sequence[PrefixQuery]) -> list[list[Mapping[str, int]]]:
        return [[{} for _ in query.prompts] for query in queries]


def make_model(folder: Path) -> None:
    """Write the model of the comparison, unless it exists."""
    if not folder.exists():
        write_random_llava(folder, vision=TOWER)


def body(model: str, seed: int) -> dict[str, Any]:
    data = base64.b64encode(picture(seed, width=224, height=224)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [{"type": "text", "text": f"question {seed} "}, image, {"type": "text", "text": "what is it?"}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}


async def ask(url: str, model: str, requests: int, at_a_time: int) -> None:
    numbers = iter(range(requests))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            seed = number - 2 * at_a_time if number % REPEATED == REPEATED - 1 else number
            answer = await http.post(f"{url}/v1/chat/completions", json=body(model, max(seed, 0)))
            if answer.status_code != 200:
                raise SystemExit(f"request {number}: {answer.status_code} {answer.text}")

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(at_a_time)))


async def measure(folder: Path, requests: int, at_a_time: int) -> list[RequestEvent]:
    """Return the requests' events in the order in which they ended."""
    registry, clock, tasks, bus = ListedRegistry(), SystemClock(), TaskOwner(), RecordingBus()
    own: dict[str, Any] = {
        "engine": "torch", "model_path": str(folder), "device": "cpu", "threads": 1, "kv_memory_mb": 32,
        "registry": registry,
    }  # fmt: skip
    # Workers and gateway share one process, in which a step may block the event loop.
    patient = {"silent_after_ms": 20_000, "max_silent_ms": 60_000}
    settings = GatewaySettings.model_validate(
        {"port": 0, "drain_s": 1, "models": {folder.name: str(folder)}, **patient}
    )
    opened = open_gateway(
        settings=settings,
        ports=GatewayPorts(bus, registry, EmptyKvIndex()),
        catalog=load_catalog(settings.models),
        sock=bind(settings.host, 0, "FULCRUM_GATEWAY_PORT"),
        clock=clock,
        tasks=tasks,
    )
    async with (
        local_worker("prefill-0", "prefill", **own),
        local_worker("prefill-1", "prefill", **own),
        local_worker("decode-0", "decode", **own),
        opened as running,
    ):
        await until(lambda: len(running.fleet.views()) == 3, what="the workers", timeout_s=600)
        await ask(running.url, folder.name, requests, at_a_time)
    await tasks.close()
    return [each for each in bus.published if isinstance(each, RequestEvent) and each.ttft_ns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, written if it is missing")
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--only-write", action="store_true", help="write the model and end")
    given = parser.parse_args()
    make_model(given.model)
    if given.only_write:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    events = asyncio.run(measure(given.model, given.requests, given.at_a_time))[WARM_UP:]
    pairs = [(each.predicted_ttft_ns / 1e6, each.ttft_ns / 1e6) for each in events]
    print(
        json.dumps(
            {
                "requests": len(pairs),
                "predicted_ms_p50": round(median(predicted for predicted, _ in pairs), 1),
                "measured_ms_p50": round(median(measured for _, measured in pairs), 1),
                "predicted_of_measured_p50": round(median(predicted / measured for predicted, measured in pairs), 3),
                "absolute_error_p50": round(median(abs(predicted / measured - 1) for predicted, measured in pairs), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
