"""A slice of Mooncake's conversation trace as prompts: equal hash ids give equal blocks of token ids."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLE = "FULCRUM_DATA"
FILE = "mooncake_conversation.jsonl"
HASH_TOKENS = 512
"""Prompt tokens that one hash id stands for."""
TOKENS = 256
"""Ids are drawn below this: the built-in tokenizer's bytes."""
TICK_MS = 3000
"""The trace's clock ticks so seldom; what came in one tick is spread over it."""


class NoTrace(Exception):
    """The trace is not on this machine; the message says where to get it."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of the trace."""

    at_s: float
    """From the slice's start."""
    prompt_tokens: int
    hash_ids: Sequence[int]


def trace_path() -> Path:
    """Raises NoTrace."""
    folder = os.environ.get(VARIABLE, "")
    path = Path(folder) / FILE
    if not folder or not path.is_file():
        raise NoTrace(f"{VARIABLE} names no folder with {FILE}; docs/data.md says where to download it")
    return path


def read_slice(path: Path, start_s: float, length_s: float) -> list[TracedRequest]:
    """Requests that came in [start_s, start_s + length_s), in order of arrival."""
    ticks: dict[int, list[tuple[int, Sequence[int]]]] = {}
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            if start_s * 1000 <= row["timestamp"] < (start_s + length_s) * 1000:
                ticks.setdefault(row["timestamp"] // TICK_MS, []).append((row["input_length"], row["hash_ids"]))
    return [
        TracedRequest((tick + place / len(rows)) * TICK_MS / 1000 - start_s, tokens, hash_ids)
        for tick, rows in sorted(ticks.items())
        for place, (tokens, hash_ids) in enumerate(rows)
    ]


def prompts_json(requests: Sequence[TracedRequest]) -> list[bytes]:
    """Each prompt as a JSON array of token ids; the last hash id of one stands for what is left of it."""
    encoded: dict[tuple[int, int], bytes] = {}
    prompts = []
    for request in requests:
        parts = []
        for place, hash_id in enumerate(request.hash_ids):
            key = hash_id, min(HASH_TOKENS, request.prompt_tokens - place * HASH_TOKENS)
            if key not in encoded:
                tokens = np.random.default_rng(hash_id).integers(0, TOKENS, HASH_TOKENS)[: key[1]]
                encoded[key] = ",".join(map(str, tokens)).encode()
            parts.append(encoded[key])
        prompts.append(b"[" + b",".join(parts) + b"]")
    return prompts
