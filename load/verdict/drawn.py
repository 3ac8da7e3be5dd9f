"""Devices and settings of a suite of simulated GPUs, drawn by seed; the same for live suites and for those in virtual
time."""

import random
from dataclasses import dataclass
from typing import Any, Final

from libs.perfmodel.profiles import profile
from load.verdict.situations import CHUNK_TOKENS, MAX_SEQUENCES, TTFT_S, Device

PROFILES: Final = (("llama-70b-tp4-h100", (0.07, 0.09), 310.0), ("llama-8b-h100", (0.03, 0.04), 330.0))
"""(name, how much faster than it devices run, TPOT target in ms). Steps of a fifth of a second: few requests a second
fill eight workers, and what a busy machine adds to a step is little beside it."""
LITTLE_KV_TOKENS: Final = (3_400, 4_400)
LITTLE_KV_TTFT_S: Final = 8.0
"""There many long prompts come at once, and are to be no shortage."""
MUCH_KV_TOKENS: Final = 60_000
LINK_GBPS: Final = 400.0
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class DrawnSuite:
    """What workers are, and what services are set to."""

    device: Device
    profile: str
    speedup: float
    kv_bytes: int
    """Of a token."""
    memory_mb: int

    def worker(self) -> dict[str, Any]:
        """Settings by field."""
        return {
            "prefill_chunk_tokens": CHUNK_TOKENS,
            "max_sequences": MAX_SEQUENCES,
            "block_size_tokens": BLOCK_TOKENS,
            "threads": 1,
            "sim_profile": self.profile,
            "sim_speedup": self.speedup,
            "sim_kv_memory_mb": self.memory_mb,
            "sim_link_gbps": LINK_GBPS,
        }

    def targets(self) -> dict[str, Any]:
        """Of gateways and metrics alike."""
        return {
            "ttft_deadline_ms": round(self.device.ttft_s * 1000),
            "tpot_target_ms": self.device.tpot_ns / 1e6,
        }

    def planner(self) -> dict[str, Any]:
        """Of a planner that only advises, by the same target."""
        return {"mode": "advisory", "tpot_target_ms": self.device.tpot_ns / 1e6}

    def link_gbps(self, isl: int, link_s: float) -> float:
        """Of a link that takes so long for the KV of a prompt."""
        return isl * self.kv_bytes * 8 / link_s / 1e9 / self.speedup


def draw_suite(seed: int, *, little_kv: bool) -> DrawnSuite:
    """One of `PROFILES`, and how fast it is."""
    drawn = random.Random(seed)
    name, (low, high), tpot_ms = drawn.choice(PROFILES)
    chosen, speedup = profile(name), drawn.uniform(low, high)
    kv_tokens = drawn.randint(*LITTLE_KV_TOKENS) if little_kv else MUCH_KV_TOKENS
    memory_mb = max(round(kv_tokens * chosen.kv_bytes_per_token / 2**20), 1)
    kv_tokens = memory_mb * 2**20 // (BLOCK_TOKENS * chosen.kv_bytes_per_token) * BLOCK_TOKENS
    ttft_s = LITTLE_KV_TTFT_S if little_kv else TTFT_S
    device = Device(chosen.step_time.scaled(1 / speedup), kv_tokens, round(tpot_ms * 1e6), ttft_s)
    return DrawnSuite(device, name, speedup, chosen.kv_bytes_per_token, memory_mb)
