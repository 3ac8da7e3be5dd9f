"""Records, channels and cards as Dynamo 1.6.1 writes them, and its discovery folders."""

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

WORKER: Final = 14220450168869795959
PUBLISHER: Final = 8673401602705136
NOW_MS: Final = 1_795_937_080_000
TOPIC: Final = "forward-pass-metrics"


def record(counter: int = 1, wall_s: float = 0.006, worker: int = WORKER, **scheduled: int) -> dict[str, Any]:
    return {
        "version": 1, "worker_id": str(worker), "dp_rank": 0, "counter_id": counter, "wall_time": wall_s,
        "scheduled_requests": scheduled, "queued_requests": {"sum_prefill_tokens": 7, "num_prefill_requests": 1},
    }  # fmt: skip


def message(
    body: dict[str, Any], at_ms: int = NOW_MS, sequence: int | None = None, version: int = 1, publisher: int = PUBLISHER
) -> list[bytes]:
    envelope = {
        "publisher_id": publisher, "sequence": body["counter_id"] if sequence is None else sequence,
        "published_at": at_ms, "topic": TOPIC, "payload": msgspec.msgpack.encode(body),
    }  # fmt: skip
    found = msgspec.msgpack.encode(envelope)
    return [TOPIC.encode(), bytes(8), bytes(8), bytes((version,)) + len(found).to_bytes(4, "big") + found]


def card(role: str = "prefill", ranks: int = 1, worker: int = WORKER) -> dict[str, Any]:
    return {
        "component": "prefill", "instance_id": worker,
        "card_json": {
            "display_name": "tiny", "worker_type": role, "kv_cache_block_size": 64,
            "runtime_config": {
                "total_kv_blocks": 16384, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
                "data_parallel_size": ranks,
            },
        },
    }  # fmt: skip


def channel(endpoint: str = "tcp://127.0.0.1:1", publisher: int = PUBLISHER) -> dict[str, Any]:
    scope = {"kind": "endpoint", "endpoint": {"namespace": "dynamo", "component": "prefill", "name": "generate"}}
    transport = {"kind": "Zmq", "config": {"endpoint": endpoint}}
    return {"instance_id": publisher, "topic": TOPIC, "scope": scope, "transport": transport}


def join(folder: Path, card: dict[str, Any], channel: dict[str, Any]) -> list[Path]:
    """Write the files of a worker into a discovery folder, and return them."""
    files = (
        (folder / "v1" / "mdc", f"dynamo/{card['component']}/generate/{card['instance_id']:x}", card),
        (folder / "v1" / "event_channels", f"topic/{TOPIC}/{channel['instance_id']:x}", channel),
    )
    written = []
    for parent, name, body in files:
        parent.mkdir(parents=True, exist_ok=True)
        written.append(parent / quote(name, safe="").replace("-", "%2D"))
        written[-1].write_text(json.dumps(body))
    return written
