"""What the lab is compared on: traces, and the clusters that serve them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from libs.lab.traces.generate import generate
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace
from libs.perfmodel.profiles import Profile, profile
from libs.policy.roles import Role
from load.lab.fidelity import Place

MIB: Final = 2**20
PREFILL, DECODE = (Role.PREFILL, 0), (Role.MIXED, 0)
LLAMA_70B, LLAMA_8B, SMOLLM2 = "llama-70b-tp4-h100", "llama-8b-h100", "smollm2-135m-cpu"
TWO_AND_TWO: Final = (PREFILL, PREFILL, DECODE, DECODE)
MOST_PROMPT: Final = 7_000
"""Of the built-in model's context."""
WARM_UP: Final = "poisson:rate=4,isl=500,osl=20,seconds=8"


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a cluster."""

    trace: str
    profile: str
    roles: Sequence[tuple[Role, int]]
    chunk_tokens: int = 2048
    max_sequences: int = 64
    link_gbps: float = 100.0
    kv_mib: int = 0
    """Of a worker; 0: the profile's."""

    def place(self) -> Place:
        """With KV memory in whole MiB, as the sim engine's setting has it."""
        found: Profile = profile(self.profile)
        memory = (self.kv_mib or found.kv_memory_bytes // MIB) * MIB
        return Place(
            replace(found, kv_memory_bytes=memory), self.roles, self.chunk_tokens, self.max_sequences, self.link_gbps
        )


CAPACITY_RPS: Final = 16.55
"""Prompts of 1,500 tokens in the mean that two prefill workers compute, at 120.8 ms each: what bounds that cluster."""
SIM_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "1p1d": Case("poisson:rate=5,isl=1500,osl=100,seconds=80", LLAMA_70B, [PREFILL, DECODE]),
        "1p1d-full": Case("poisson:rate=8,isl=1500,osl=100,seconds=40", LLAMA_70B, [PREFILL, DECODE]),
        "2p2d-half": Case(f"poisson:rate={0.5 * CAPACITY_RPS:.2f},isl=1500,osl=100,seconds=60", LLAMA_70B, TWO_AND_TWO),
        "2p2d-nine-tenths": Case(
            f"poisson:rate={0.9 * CAPACITY_RPS:.2f},isl=1500,osl=100,seconds=40", LLAMA_70B, TWO_AND_TWO
        ),
        "2p2d-bursts": Case("gamma:rate=10,cv=2,isl=1500,osl=100,seconds=50", LLAMA_70B, TWO_AND_TWO),
        "2p2d-flipflop": Case("flipflop:rate=6,isl=2000,osl=120,seconds=60", LLAMA_70B, TWO_AND_TWO),
        "2p2d-little-kv": Case("poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, TWO_AND_TWO, kv_mib=4500),
        "2p2d-few-places": Case("poisson:rate=8,isl=1000,osl=150,seconds=50", LLAMA_70B, TWO_AND_TWO, max_sequences=10),
        "mixed": Case("poisson:rate=2,isl=1000,osl=100,seconds=150", LLAMA_70B, [(Role.MIXED, 512)]),
        "2p2d-chats": Case("poisson:rate=8,isl=500,osl=80,seconds=50,sessions=40", LLAMA_70B, TWO_AND_TWO),
        "2p2d-mooncake": Case("mooncake_conversation.jsonl@600+300", LLAMA_8B, TWO_AND_TWO),
    }
)


@dataclass(frozen=True, slots=True)
class Live:
    """A case on a suite of processes."""

    case: Case
    """Its trace lacks its length and its seed."""
    arguments: Sequence[str]
    """Of `fulcrum up`."""
    real: bool = False
    """An engine that computes: its step times are those that the workers of the calibrating run learned."""


LIVE: Final[Mapping[str, Live]] = MappingProxyType(
    {
        "live": Live(
            Case("poisson:rate=30,isl=300,osl=12", LLAMA_8B, TWO_AND_TWO),
            ("--engine", "sim", "--prefill", "2", "--decode", "2"),
        ),
        "live-long": Live(
            Case("poisson:rate=8,isl=2000,osl=60", LLAMA_70B, TWO_AND_TWO),
            ("--engine", "sim", "--prefill", "2", "--decode", "2"),
        ),
        "torch": Live(
            Case(
                "poisson:rate=0.6,isl=120,osl=24",
                SMOLLM2,
                [PREFILL, DECODE],
                chunk_tokens=512,
                max_sequences=16,
                link_gbps=50.0,
                kv_mib=512,
            ),
            ("--engine", "torch", "--prefill", "1", "--decode", "1"),
            real=True,
        ),
    }
)


def traces_of(text: str, count: int) -> list[Trace]:
    """`count` traces of a kind, or a part of a file; none where the file is absent."""
    name, cut, part = text.partition("@")
    if not cut:
        return [generate(text, seed=seed) for seed in range(1, count + 1)]
    path = Path(os.environ.get("FULCRUM_DATA", "")) / name
    if not path.is_file():
        return []
    start_s, seconds = map(float, part.split("+"))
    return [read_trace(path, seed=1, start_s=start_s, seconds=seconds)]


def live_trace(live: Live, seconds: float, seed: int) -> Trace:
    """One that a suite can be asked."""
    return short(generate(f"{live.case.trace},seconds={seconds:g}", seed=seed))


def short(trace: Trace) -> Trace:
    """With prompts that fit the context, and two tokens or more to each answer, so that all are handed over."""
    requests = [
        replace(each, input_tokens=min(each.input_tokens, MOST_PROMPT), output_tokens=max(each.output_tokens, 2))
        for each in trace.requests
    ]
    return replace(trace, requests=tuple(requests))
