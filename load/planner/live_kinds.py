"""Kinds of live suites that stories run on: simulated GPUs, and engines that compute."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from libs.lab.experiment import Experiment
from libs.lab.hardware import Hardware
from libs.lab.slo import SloSpec, parse_slo
from libs.lab.traces.request import Trace
from libs.perfmodel.profiles import profile
from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.testing.engines.real_model import random_model_folder
from load.gpu.shapes import SHAPES, SMOLLM2_135M
from load.lab.fidelity import MIB, ClusterShape
from load.lab.fidelity_live import settings, sim_settings
from load.planner.bench_role import tiny_model

# Simulated workers in a process.
PER_PROCESS: Final = 8
# Cores for gateway, client, stores, planner and metrics, where the machine has more.
CORES_BESIDE: Final = 4


@dataclass(frozen=True, slots=True)
class LiveKind:
    """Workers of one kind, and the SLO of their clients."""

    place: ClusterShape
    """One worker of the kind; its step times are a guess where an engine computes."""
    slo: SloSpec
    speedup: float = 1.0
    """Speed of a simulated GPU over its profile's."""
    write_model: Callable[[Path], Path] | None = None
    """Writes a model for the engine `torch` into a folder that it makes; None for simulated GPUs."""
    threads: int = 1

    @property
    def simulated(self) -> bool:
        """Return whether its step times are the profile's, by construction."""
        return self.write_model is None

    @property
    def step_time(self) -> StepTimeModel:
        return self.place.profile.step_time.scaled(1 / self.speedup)

    @property
    def speed(self) -> Speed:
        return Speed(self.step_time, self.place.chunk_tokens)

    def with_steps(self, steps: StepTimeModel) -> "LiveKind":
        """Return the kind that the lab should simulate, with these step times."""
        profile = replace(self.place.profile, step_time=steps)
        return replace(self, speedup=1.0, place=replace(self.place, profile=profile))

    def experiment(self, trace: Trace, workers: int, *, seed: int = 1) -> Experiment:
        """Return the same requests on as many of these workers in the lab."""
        place = self.place
        return Experiment(
            trace,
            Hardware(replace(place.profile, step_time=self.step_time), mixed_measured=True),
            workers,
            self.slo,
            seed=seed,
            link_gbps=place.link_gbps / place.profile.gpus,
            chunk_tokens=place.chunk_tokens,
            max_sequences=place.max_sequences,
        )

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of `fulcrum up`; files that they name are written into `folder`."""
        if self.write_model is None:
            return ["--engine", "sim", "--workers-per-process", str(PER_PROCESS)]
        return ["--engine", "torch", "--model", str(self.write_model(folder / "model"))]

    def env(self, trace: Trace) -> dict[str, str]:
        env = settings(self.place, trace)
        if self.simulated:
            return env | sim_settings(self.place) | {"FULCRUM_WORKER_SIM_SPEEDUP": str(self.speedup)}
        return env | {"FULCRUM_WORKER_THREADS": str(self.threads)}


def _place(name: str, *, chunk_tokens: int, max_sequences: int, link_gbps: float, kv_mib: int = 0) -> ClusterShape:
    found = profile(name)
    if kv_mib:
        found = replace(found, kv_memory_bytes=kv_mib * MIB)
    return ClusterShape(found, [(Role.PREFILL, 0)], chunk_tokens, max_sequences, link_gbps)


# Limits of all kinds.
TTFT_MS: Final = 5_000
TPOT_MS: Final = 120
# Slow GPUs: fewer requests a second fill sixteen of them, so that two cores carry all processes.
SIM: Final = LiveKind(
    _place("llama-70b-tp4-h100", chunk_tokens=2048, max_sequences=16, link_gbps=400.0),
    parse_slo(f"ttft=max({TTFT_MS}ms,3x),tpot={TPOT_MS}ms"),
    speedup=0.4,
)
TORCH_TINY: Final = LiveKind(
    _place("smollm2-135m-cpu", chunk_tokens=256, max_sequences=8, link_gbps=50.0, kv_mib=96),
    parse_slo(f"ttft={TTFT_MS}ms,tpot={TPOT_MS}ms"),
    write_model=tiny_model,
)
# Random weights in the shape of SmolLM2-135M take as long to compute as its own. Each worker gets a third of the
# cores.
TORCH_SMOLLM2: Final = LiveKind(
    _place("smollm2-135m-cpu", chunk_tokens=256, max_sequences=16, link_gbps=50.0, kv_mib=512),
    parse_slo(f"ttft={TTFT_MS}ms,tpot={TPOT_MS}ms"),
    write_model=lambda folder: random_model_folder(folder, **SHAPES[SMOLLM2_135M]),
    threads=max((os.cpu_count() or 1) - CORES_BESIDE, 3) // 3,
)
