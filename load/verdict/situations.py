"""Planted situations, drawn by seed: roles, requests, faults and devices, and the expected verdict."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from libs.perfmodel.profiles import profile
from libs.policy.pressure import KV_FILL, WorkerProfile, Workload, most_decodes
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.state import least_pressed

WORKERS: Final = 8
CHUNK_TOKENS: Final = 512
MAX_SEQUENCES: Final = 32
TTFT_S: Final = 4.0
# The share of the whole cluster's best capacity that an imbalance may require at most.
FIT: Final = 0.85
MOST_DRAWS: Final = 2_000
# The upper bounds of the load that two cores can send beside the suite.
MOST_RATE: Final = 22.0
MOST_AT_ONCE: Final = 140
# The share of the TTFT limit that prompts arriving at once may take of prefill workers.
MOST_PROMPTS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Device:
    step_time: StepTimeModel
    kv_tokens: int
    tpot_ns: int
    ttft_s: float = TTFT_S

    @property
    def engine(self) -> WorkerProfile:
        """The worker as the computation of pressure describes it."""
        return WorkerProfile(self.step_time, CHUNK_TOKENS, MAX_SEQUENCES, self.kv_tokens)

    def prompt_s(self, tokens: float) -> float:
        """Return the seconds that a worker takes for one prompt."""
        return tokens / self.engine.speed_at(tokens) / 1e9

    def step_s(self, batch: float, context: float) -> float:
        """Return the seconds of one decode step."""
        model = self.step_time
        steps = model.reading_ns(batch) + model.sequences_ns(batch) + batch * context * model.decode_kv_token_ns
        return steps / 1e9

    def largest_batch(self, context: float) -> int:
        """Return the largest batch of one worker within the TPOT target."""
        return round(most_decodes(self.engine, self.tpot_ns, round(context)))


@dataclass(frozen=True, slots=True)
class Load:
    """A load of requests: `at_once` at the start, then `rate` a second."""

    isl: int
    osl: int
    rate: float
    at_once: int = 0


@dataclass(frozen=True, slots=True)
class Planted:
    name: str
    wanted: frozenset[str]
    """The codes of which the verdict must have one; empty allows only balanced or idle."""
    behind: frozenset[str]
    """The codes that must be among the causes as well."""
    prefill: int
    before: Load | None
    """A load that runs for some seconds before; None for no load."""
    load: Load
    faults: Mapping[str, Any] = field(default_factory=dict)
    """The faults of the first worker of a role, or of all: {"decode": {"slow": 3}}, {"every decode": {"link_s": 2}}."""
    batch_lines: int = 0
    first: frozenset[str] = frozenset()
    """The codes that may be named until clients see the cause."""

    @property
    def decode(self) -> int:
        return WORKERS - self.prefill


def work_of(device: Device, load: Load, decode: int) -> Workload:
    """Return the workload of a load in its steady state."""
    context = load.isl + load.osl / 2
    batch = 0.0
    for _ in range(50):  # converges to the number of sequences, which depends on their stay and the other way round
        stay_s = load.osl * device.step_s(max(batch / decode, 0.01), context)
        batch = 0.5 * batch + 0.5 * min(load.rate * stay_s, 4.0 * MAX_SEQUENCES * decode)
    count = round(max(batch, load.at_once))
    return Workload(load.rate * device.prompt_s(load.isl), count, round(count * context), device.tpot_ns)


def presses(device: Device, load: Load, prefill: int) -> tuple[float, float, float, float]:
    """Return the true pressures: (prefill, batch, KV, the minimum over all splits of roles)."""
    decode = WORKERS - prefill
    work = work_of(device, load, decode)
    context = load.isl + load.osl / 2
    batch = work.decodes / (device.largest_batch(context) * decode)
    kv = work.kv_tokens / (device.kv_tokens * KV_FILL * decode)
    return work.prompts / prefill, batch, kv, least_pressed(device.engine, work, WORKERS).pressure


def _draw(random_: random.Random, make: Callable[[], Planted | None]) -> Planted:
    for _ in range(MOST_DRAWS):
        found = make()
        if found is None or found.load.rate > MOST_RATE or found.load.at_once > MOST_AT_ONCE:
            continue
        return found
    raise RuntimeError("no situation of that kind is possible on this device")


class Situations:
    def __init__(self, device: Device, seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)

    def of(self, name: str) -> Planted:
        """Draw a situation by one of the names in `NAMES` or `KV_NAMES`."""
        make: Callable[[], Planted | None] = getattr(self, f"_{name}")
        return _draw(self._random, make)

    def _lengths(self, osl: tuple[int, int] = (16, 48)) -> tuple[int, int]:
        return self._random.randint(80, 400), self._random.randint(*osl)

    def _prefill_load(self, prefill: int, pressure: float) -> Load:
        isl, out = self._lengths((12, 40))
        return Load(isl, out, pressure * prefill / self._device.prompt_s(isl))

    def _decode_load(self, decode: int, pressure: float, *, kv: bool, isl: tuple[int, int] = (60, 150)) -> Load:
        """Draw a load whose concurrent sequences have this pressure. A new sequence replaces each one that ends."""
        isl_drawn = self._random.randint(*((250, 400) if kv else isl))
        out = self._random.randint(150, 260)
        context, device = isl_drawn + out / 2, self._device
        most = device.kv_tokens * KV_FILL / context if kv else device.largest_batch(context)
        count = math.ceil(pressure * most * decode)
        return Load(isl_drawn, out, count / (out * device.step_s(count / decode, context)), count)

    def _calm(self, prefill: int) -> Load:
        """Draw a load of about a third of the capacity of either phase, or less."""
        isl, out = self._lengths()
        for rate in (1.0, 0.8, 0.6, 0.4, 0.3, 0.2):
            load = Load(isl, out, rate)
            if max(presses(self._device, load, prefill)[:3]) < 0.45:
                return load
        return Load(isl, 16, 0.2)

    def _prefill_bound(self, **more: Any) -> Planted | None:
        prefill = self._random.randint(2, 5)
        load = self._prefill_load(prefill, self._random.uniform(1.5, 2.2))
        found = presses(self._device, load, prefill)
        if found[0] < 1.4 or max(found[1:3]) > 0.6 or found[3] > FIT:
            return None
        return Planted("prefill_bound", frozenset({"prefill_bound"}), frozenset(), prefill, None, load, **more)

    def _decode_bound(self, *, kv: bool) -> Planted | None:
        decode = self._random.randint(2, 4)
        load = self._decode_load(decode, self._random.uniform(1.3, 1.8), kv=kv)
        found = presses(self._device, load, WORKERS - decode)
        own, other = (found[2], found[1]) if kv else (found[1], found[2])
        if own < 1.25 or own < other * 1.3 or found[0] > 0.6 or found[3] > FIT:
            return None
        if load.at_once * self._device.prompt_s(load.isl) > MOST_PROMPTS * self._device.ttft_s * (WORKERS - decode):
            return None  # those at once would be short of prefill for a while
        code = "decode_bound_kv" if kv else "decode_bound_tpot"
        return Planted(code, frozenset({code}), frozenset(), WORKERS - decode, None, load)

    def _decode_bound_tpot(self) -> Planted | None:
        return self._decode_bound(kv=False)

    def _decode_bound_kv(self) -> Planted | None:
        return self._decode_bound(kv=True)

    def _balanced(self, low: float, high: float) -> tuple[int, Load] | None:
        """Draw a split and a load whose worse phase has a pressure in [low, high]; None if the draw is outside."""
        prefill = self._random.randint(2, 6)
        isl, out = self._lengths((30, 120))
        rate = self._random.uniform(low, high) * prefill / self._device.prompt_s(isl)
        load = Load(isl, out, rate)
        found = presses(self._device, load, prefill)
        return (prefill, load) if low <= max(found[:3]) <= high else None

    def _slow_link(self, *, slow_too: bool = False) -> Planted | None:
        found = self._balanced(0.25, 0.5)
        if found is None:
            return None
        prefill, load = found
        decode = WORKERS - prefill
        # A decode worker gets a sequence in each such interval, and its slow link takes longer for the KV.
        if load.rate / decode < 0.4:
            return None
        each_s = decode / load.rate
        faults: dict[str, Any] = {"every decode": {"link_s": each_s * self._random.uniform(1.2, 2.5)}}
        if slow_too:
            faults["prefill"] = {"slow": self._random.uniform(2.2, 3.5)}
            if prefill < 3:
                return None
        behind = frozenset({"slow_link", "slow_worker"}) if slow_too else frozenset[str]()
        wanted = frozenset({"slow_link", "slow_worker"}) if slow_too else frozenset({"slow_link"})
        return Planted("slow_link", wanted, behind, prefill, load, load, faults)

    def _slow_worker(self) -> Planted | None:
        found = self._balanced(0.25, 0.5)
        if found is None:
            return None
        prefill, load = found
        phase = self._random.choice(("prefill", "decode"))
        if (prefill if phase == "prefill" else WORKERS - prefill) < 3:
            return None
        faults = {phase: {"slow": self._random.uniform(2.2, 3.5)}}
        return Planted("slow_worker", frozenset({"slow_worker"}), frozenset(), prefill, load, load, faults)

    def _too_small(self) -> Planted | None:
        prefill = self._random.randint(3, 5)
        decode = WORKERS - prefill
        rather = self._decode_load(decode, self._random.uniform(1.3, 1.7), kv=False, isl=(150, 350))
        rate = self._random.uniform(1.3, 1.7) * prefill / self._device.prompt_s(rather.isl)
        load = Load(rather.isl, rather.osl, rate, rather.at_once)
        found = presses(self._device, load, prefill)
        if min(found[0], max(found[1:3])) < 1.2 or found[3] < 1.2:
            return None
        # Prompts are short of capacity before decodes are, since each decode starts with a prompt.
        prompts = frozenset({"prefill_bound"})
        return Planted("too_small", frozenset({"too_small"}), frozenset(), prefill, None, load, first=prompts)

    def _two_prefill_and_slow(self) -> Planted | None:
        planted = self._prefill_bound()
        if planted is None or planted.decode < 3:
            return None
        faults = {"decode": {"slow": self._random.uniform(2.2, 3.5)}}
        both = frozenset({"prefill_bound", "slow_worker"})
        return Planted("two: prefill and worker", both, both, planted.prefill, None, planted.load, faults)

    def _two_link_and_slow(self) -> Planted | None:
        return self._slow_link(slow_too=True)

    def _busy(self) -> Planted | None:
        found = self._balanced(0.6, 0.75)
        return None if found is None else Planted("busy", frozenset(), frozenset(), found[0], None, found[1])

    def _batch_backlog(self) -> Planted | None:
        prefill = self._random.randint(2, 6)
        load = self._calm(prefill)
        lines = self._random.randint(120, 250)
        return Planted("batch_backlog", frozenset(), frozenset(), prefill, load, load, batch_lines=lines)


NAMES: Final = (
    "prefill_bound",
    "decode_bound_tpot",
    "slow_link",
    "slow_worker",
    "too_small",
    "busy",
    "two_prefill_and_slow",
    "batch_backlog",
    "two_link_and_slow",
)
KV_NAMES: Final = ("decode_bound_kv", "busy", "decode_bound_kv", "slow_worker", "decode_bound_kv", "slow_link")
"""The situations for devices with little KV memory."""


def arrivals(load: Load, seed: int, seconds: float) -> Iterator[tuple[float, int, int]]:
    """Yield (time in seconds, ISL, OSL) of each request. Lengths vary by a quarter.

    The requests at once arrive within 0.2 s, then a Poisson process follows.
    """
    drawn = random.Random(seed)

    def length(mean: int) -> int:
        return max(round(mean * drawn.uniform(0.75, 1.25)), 2)

    for number in range(load.at_once):
        yield 0.2 * number / load.at_once, length(load.isl), length(load.osl)
    at_s = 0.0
    while load.rate and (at_s := at_s + drawn.expovariate(load.rate)) < seconds:
        yield at_s, length(load.isl), length(load.osl)


# (name, range of the speed factor, TPOT target in ms). Steps take a fifth of a second. A few requests a second then
# fill eight workers, and delays of a busy machine are small compared with a step.
PROFILES: Final = (("llama-70b-tp4-h100", (0.07, 0.09), 310.0), ("llama-8b-h100", (0.03, 0.04), 330.0))
LITTLE_KV_TOKENS: Final = (3_400, 4_400)
# With little KV, many long prompts arrive at once, and must not count as a shortage.
LITTLE_KV_TTFT_S: Final = 8.0
MUCH_KV_TOKENS: Final = 60_000
LINK_GBPS: Final = 400.0
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class DrawnSuite:
    """A drawn device, with the matching settings of workers and services."""

    device: Device
    profile: str
    speedup: float
    kv_bytes: int
    """The KV bytes of one token."""
    memory_mb: int

    def worker(self) -> dict[str, Any]:
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
        """Return the SLO targets of gateways and metrics."""
        return {
            "ttft_deadline_ms": round(self.device.ttft_s * 1000),
            "tpot_target_ms": self.device.tpot_ns / 1e6,
        }

    def planner(self) -> dict[str, Any]:
        return {"tpot_target_ms": self.device.tpot_ns / 1e6}

    def link_gbps(self, isl: int, link_s: float) -> float:
        """Return the speed of a link that takes `link_s` for the KV of a prompt."""
        return isl * self.kv_bytes * 8 / link_s / 1e9 / self.speedup


def draw_suite(seed: int, *, little_kv: bool) -> DrawnSuite:
    """Draw one of `PROFILES`, and its speed."""
    drawn = random.Random(seed)
    name, (low, high), tpot_ms = drawn.choice(PROFILES)
    chosen, speedup = profile(name), drawn.uniform(low, high)
    kv_tokens = drawn.randint(*LITTLE_KV_TOKENS) if little_kv else MUCH_KV_TOKENS
    memory_mb = max(round(kv_tokens * chosen.kv_bytes_per_token / 2**20), 1)
    kv_tokens = memory_mb * 2**20 // (BLOCK_TOKENS * chosen.kv_bytes_per_token) * BLOCK_TOKENS
    ttft_s = LITTLE_KV_TTFT_S if little_kv else TTFT_S
    device = Device(chosen.step_time.scaled(1 / speedup), kv_tokens, round(tpot_ms * 1e6), ttft_s)
    return DrawnSuite(device, name, speedup, chosen.kv_bytes_per_token, memory_mb)
