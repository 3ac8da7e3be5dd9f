"""Deployment profiles of models on GPU machines: workers, their first roles, their GPUs and vLLM's arguments."""

import json
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from libs.contracts.errors import StartupError
from libs.engine.config import Parallel, parallel_of

ROLES: Final = ("prefill", "decode", "mixed")
SPARE: Final = "spare"
"""The role of a worker on standby, until the planner assigns another."""
POOL: Final = "pool"
"""The role of a worker to which the planner assigns models."""
MIXED_BUDGET_TOKENS: Final = 256
"""The prompt tokens that a step of a mixed worker computes beside its decodes, until the planner sets a budget."""


def service_of(role: str) -> str:
    """Return the name of the service that runs a worker with this role."""
    return "prefill" if role == "prefill" else "decode"


def role_settings(role: str) -> Mapping[str, str]:
    """Return the settings that give a worker this role."""
    if role == POOL:
        return {"FULCRUM_WORKER_ROLE": "standby", "FULCRUM_WORKER_POOL": "1"}
    budget = {"FULCRUM_WORKER_BUDGET_TOKENS": str(MIXED_BUDGET_TOKENS)} if role == "mixed" else {}
    return {"FULCRUM_WORKER_ROLE": "standby" if role == SPARE else role, **budget}


FOLDER: Final = Path(__file__).parent / "profiles"


class ProfileWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker, which is a tensor-parallel group on one node."""

    role: Literal["prefill", "decode", "mixed"]
    devices: tuple[int, ...]
    """The indices of the worker's GPUs on its node."""
    arguments: dict[str, Any]
    node: int = 0
    max_sequences: int = 64
    # 0 means that the worker measures it at its start.
    prefill_chunk_tokens: int = 0
    block_size_tokens: int = 64

    @property
    def gpus(self) -> int:
        return len(self.devices)

    @property
    def service(self) -> str:
        return service_of(self.role)

    def settings(self, arguments: Mapping[str, Any] = MappingProxyType({})) -> Mapping[str, str]:
        """Return the variables of the worker's process beyond those that all workers share.

        `arguments` override its own.
        """
        return {
            "FULCRUM_WORKER_ENGINE": "vllm",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
            "FULCRUM_WORKER_DEVICE": "cuda",
            **self._shared(),
            "FULCRUM_WORKER_VLLM_ARGUMENTS": json.dumps(self.arguments | dict(arguments)),
        }

    def rehearsed(self, step_times: str) -> Mapping[str, str]:
        """Return the variables of a simulated worker whose steps take as long as the step-time profile says."""
        return {**self._shared(), "FULCRUM_WORKER_SIM_PROFILE": step_times}

    def _shared(self) -> Mapping[str, str]:
        return {
            **role_settings(self.role),
            "FULCRUM_WORKER_GPUS": str(_span(self).gpus),
            "FULCRUM_WORKER_MAX_SEQUENCES": str(self.max_sequences),
            "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": str(self.prefill_chunk_tokens),
            "FULCRUM_WORKER_BLOCK_SIZE_TOKENS": str(self.block_size_tokens),
        }


class HardwarePrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hardware model's prediction for one worker. It has not been measured."""

    source: str
    """The package and version of the hardware model, with its system and backend."""
    model: str
    """The model whose shape the prediction uses, with its types."""
    prefill_ms: dict[int, float]
    """The milliseconds of one prompt, by its number of tokens."""
    decode_ms: dict[int, float]
    """The milliseconds of a step, by its number of sequences of `decode_context_tokens` tokens each."""
    decode_context_tokens: int


class DeploymentProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deployment of one model on one kind of machine."""

    model: str
    """The name of the model on the Hugging Face hub."""
    machine: str
    not_run: str
    """The steps of the profile that have not been tried, in words."""
    rehearsal: str
    """The step-time profile (libs/perfmodel/profiles.py) of its workers with `--engine sim`."""
    workers: tuple[ProfileWorker, ...]
    predicted: HardwarePrediction
    """The prediction for each worker. All workers have the same number of GPUs."""

    @property
    def nodes(self) -> int:
        """The number of machines that the profile needs."""
        return max(worker.node for worker in self.workers) + 1

    def of(self, role: str) -> list[ProfileWorker]:
        """Return the workers with a role, in order."""
        return [worker for worker in self.workers if worker.role == role]

    def model_settings(self, folder: str) -> Mapping[str, str]:
        """Return the settings for the model that `python -m libs.model.prepare` has written to `folder`."""
        return {"FULCRUM_WORKER_MODEL": self.model, "FULCRUM_WORKER_MODEL_PATH": f"{folder}/{self.model}"}

    def check(self) -> None:
        """Raise StartupError for a profile that cannot be served.

        It may have a GPU in two workers, a width other than the number of GPUs, or no worker for a role.
        """
        used = Counter((worker.node, device) for worker in self.workers for device in worker.devices)
        twice = [place for place, count in used.items() if count > 1]
        if twice:
            raise StartupError(f"GPU {twice[0][1]} of node {twice[0][0]} is in {used[twice[0]]} workers")
        for worker in self.workers:
            width = _span(worker).gpus_here
            if width != worker.gpus:
                raise StartupError(f"a {worker.role} worker has {worker.gpus} GPUs and arguments for {width}")
        roles = {worker.role for worker in self.workers}
        if "mixed" not in roles and not roles >= {"prefill", "decode"}:
            raise StartupError("it takes a prefill and a decode worker, or a mixed one")
        if len({_layout(worker) for worker in self.workers}) > 1:
            raise StartupError("its workers could not exchange KV: block size, width and types of KV must be the same")


def load_profile(name: str) -> DeploymentProfile:
    """Return the shipped profile with this name, checked. Raise StartupError that lists the names."""
    file = FOLDER / f"{name}.json"
    names = profile_names()
    if name not in names:
        near = get_close_matches(name, names, cutoff=0.3) or names
        raise StartupError(f"profile {name!r} is not known; there are: {', '.join(near)}")
    profile = msgspec.json.decode(file.read_bytes(), type=DeploymentProfile)
    profile.check()
    return profile


def profile_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def _span(worker: ProfileWorker) -> Parallel:
    try:
        return parallel_of(worker.arguments)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _layout(worker: ProfileWorker) -> tuple[Any, ...]:
    named = ("tensor_parallel_size", "dtype", "kv_cache_dtype", "quantization")
    return worker.block_size_tokens, *(worker.arguments.get(name) for name in named)
