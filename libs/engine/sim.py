"""The sim engine's runner: a step-time model in place of the forward pass.

Modelled:

- the duration of a step by its prefill and decode work, including cached context (libs/perfmodel);
- the size of KV blocks and of the device's KV memory;
- the time to load weights, by their size and a link's speed;
- a KV link of limited bandwidth, shared by all transfers into this worker.

Shared with the other engines: queueing, blocks, prefix reuse, leases, batches, events.

Not modelled:

- meaningful tokens: they follow from prompt, position, seed and guide; penalties, bias and cut-offs have no effect;
- meaningful vectors: equal prompts have equal vectors, and all others are unrelated;
- the end of an answer, except by guides, stop tokens and lengths;
- the latency of a link, and its use by the sender;
- variance between equal steps, and steps shorter than a timer's tick except in the mean.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import KvMismatch, StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import Capabilities, EngineIdentity, Pooling, Progress, PromptImage
from libs.engine.runner import Batch, ImageCounts, Sampled, without_ends
from libs.engine.sim_tokens import TokenSource
from libs.model.files import read_json
from libs.model.info import BUILTIN_SIM, SIM_VECTOR_SIZE, ModelInfo, load_model_info
from libs.perfmodel.profiles import profile

if TYPE_CHECKING:
    from libs.engine.guides import Guides


class SimGpu:
    """A GPU shared by the runners that were created with it. A runner without one has its own GPU.

    Steps are served first come, first served. If n workers have work, each gets every n-th step.
    """

    def __init__(self) -> None:
        self.steps = asyncio.Lock()
        """The lock that a step takes for its duration."""
        self.link = asyncio.Lock()
        """The lock that a copy of weights to or from the GPU takes."""


class SimRunner:
    """A device that computes nothing and takes the modelled time.

    The profile sets its KV memory; `kv_memory_mb` is ignored.
    """

    def __init__(self, config: EngineConfig, gpu: SimGpu | None = None) -> None:
        # Runners that are given the same `gpu` share it.
        self._config = config
        self._gpu = gpu or SimGpu()
        self._profile = profile(config.sim_profile)
        self._faults = SimFaults(None, "")
        self._tokens = TokenSource.builtin()
        self._eos_token_ids: frozenset[int] = frozenset()
        self._vocab_size = 0
        self._vector_size = SIM_VECTOR_SIZE
        self._device_pacer = Pacer()
        self._link_pacer = Pacer()
        self._link = asyncio.Lock()
        self._guides: Guides | None = None
        """The guides; None until the first guided answer."""

    @property
    def name(self) -> str:
        return "sim"

    @property
    def device(self) -> str:
        """The modelled device, such as "sim:llama-8b-h100".

        The name of a device with a speed-up includes its factor.
        """
        speedup = self._config.sim_speedup
        return f"sim:{self._profile.name}" + (f"/x{speedup:g}" if speedup != 1 else "")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's end tokens. The runner never samples them."""
        return self._eos_token_ids

    async def load(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Read the vocabulary of the model folder, if there is one. Raise StartupError."""
        info = load_model_info(self._config.model_path or BUILTIN_SIM)
        self._eos_token_ids, self._vocab_size = info.eos_token_ids, info.vocab_size
        self._vector_size = info.embedding.size or SIM_VECTOR_SIZE
        self._faults = SimFaults(self._config.sim_faults, identity.worker_id, asyncio.get_running_loop().time)
        if info.path is not None:
            self._tokens = TokenSource.ordinary(info.vocab_size, _special_token_ids(info))
        await self._weights(self._config.sim_load_gb_per_s, progress)
        return self._capabilities(info)

    async def sleep(self) -> None:
        """Wait for the time that a copy of the weights to host memory takes."""
        await self._copy(self._config.sim_wake_gb_per_s)

    async def _copy(self, gb_per_s: float) -> None:
        """Wait for the time that the weights take over the GPU's link."""
        config = self._config
        async with self._gpu.link:
            await asyncio.sleep(config.sim_weights_bytes / (gb_per_s * 1e9) / config.sim_speedup)

    async def wake(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Wait for the time that a copy of the weights from host memory takes."""
        await self._weights(self._config.sim_wake_gb_per_s, progress)
        return self._capabilities(load_model_info(self._config.model_path or BUILTIN_SIM))

    async def _weights(self, gb_per_s: float, progress: Progress) -> None:
        config = self._config
        size_bytes = config.sim_weights_bytes
        if size_bytes > config.sim_memory_bytes:
            raise StartupError(
                f"model {config.model_name!r} has {size_bytes / 1e9:.1f} GB of weights, the device"
                f" {config.sim_memory_bytes / 1e9:.1f} GB of memory"
            )
        if size_bytes:
            progress("loading weights", 0.0)
            await self._copy(gb_per_s)
            await asyncio.sleep(config.sim_load_overhead_s / config.sim_speedup)
        progress("loading weights", 1.0)

    def _capabilities(self, info: ModelInfo) -> Capabilities:
        block_size = self._config.block_size_tokens
        block_bytes = block_size * self._profile.kv_bytes_per_token
        kv_memory_bytes = round(self._profile.kv_memory_bytes * self._config.gpu_share)
        return Capabilities(
            block_size_tokens=block_size,
            kv_blocks=(self._config.sim_kv_memory_mb * 1024 * 1024 or kv_memory_bytes) // block_bytes,
            kv_block_bytes=block_bytes,
            max_context_tokens=info.request_tokens,
            max_sequences=self._config.max_sequences,
            kv_layout=f"sim/{self._profile.name}/block{block_size}",
            vocab_size=info.vocab_size,
            streams_kv=True,
            named_kv=True,
            scores_prompts=True,
            pools=frozenset(Pooling),
            generates=not info.encodes,
            hands_over_running_kv=True,
            sleeps=True,
            loads_adapters=True,
            chunk_tokens=self._config.prefill_chunk_tokens,
        )

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        """Wait for the modelled time divided by the speed-up, and return the next tokens."""
        step_ns = self._profile.step_time.step_ns(batch.work)
        async with self._gpu.steps:
            await self._device_pacer.spend(step_ns / 1e9 / self._config.sim_speedup * self._faults.slow())
        if any(chunk.sampling.guide or chunk.sampling.min_tokens for chunk in batch.chunks):
            sampled = await self._guided(batch)
        else:
            sampled = {chunk.sequence_id: self._tokens.sample(chunk) for chunk in batch.chunks if chunk.sample}
        for chunk in batch.chunks:
            if chunk.scored is not None:
                sampled.setdefault(chunk.sequence_id, Sampled(0)).prompt = self._tokens.score(chunk, chunk.scored)
            if chunk.pooling is not None and chunk.sample:
                sampled[chunk.sequence_id].pooled = sim_vector(chunk.history, self._vector_size)
        return sampled

    async def _guided(self, batch: Batch) -> dict[int, Sampled]:
        from libs.engine.guides import GuideFailed, load_guides  # noqa: PLC0415 (few simulations have any)

        sampled: dict[int, Sampled] = {}
        for chunk in batch.chunks:
            if not chunk.sample:
                continue
            try:
                if chunk.sampling.guide and self._guides is None:
                    info = load_model_info(self._config.model_path or BUILTIN_SIM)
                    self._guides = await asyncio.to_thread(load_guides, info)
                allowed = without_ends(chunk, self._eos_token_ids, self._vocab_size)
                if chunk.sampling.guide and self._guides is not None:
                    allowed = self._guides.allowed(chunk)
                sampled[chunk.sequence_id] = self._tokens.sample(chunk, allowed)
            except GuideFailed as failed:
                sampled[chunk.sequence_id] = Sampled(0, fault=str(failed))
        return sampled

    @property
    def image_counts(self) -> ImageCounts:
        return ImageCounts()

    def unencoded(self, images: Sequence[PromptImage]) -> list[PromptImage]:
        # The runner's capabilities exclude images, so there are none.
        return []

    async def encode(self, images: Sequence[PromptImage]) -> dict[bytes, str]:
        return {}

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        # KV is only counted, so there are no bytes.
        return ()

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        """Write nothing. Raise KvMismatch if there is data."""
        if data:
            raise KvMismatch(f"the sim engine got bytes for {len(blocks)} KV blocks, it has no use for any")

    async def transfer(self, data_bytes: int) -> None:
        """Wait for the link, then for the time that it takes to send the bytes."""
        async with self._link:
            gbps = self._faults.link_gbps(self._config.sim_link_gbps)
            await self._link_pacer.spend(data_bytes * 8 / (gbps * 1e9 * self._config.sim_speedup))

    async def close(self) -> None:
        # There is nothing to free.
        ...


def sim_vector(token_ids: NDArray[np.int32], size: int) -> NDArray[np.float32]:
    """Return [size] 1D float32: a unit vector that depends on all tokens and has no meaning."""
    seed = crc32(token_ids.astype("<i4").tobytes())
    drawn = np.random.default_rng(seed).standard_normal(size)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _special_token_ids(info: ModelInfo) -> frozenset[int]:
    assert info.path is not None
    file = info.path / "tokenizer.json"
    added = read_json(file).get("added_tokens", []) if file.exists() else []
    return info.eos_token_ids | {entry["id"] for entry in added if entry.get("special")}


# Shorter times are added to the next call instead, since a sleep would overshoot them.
MIN_SLEEP_S = 50e-6
MAX_CARRY_S = 2e-3


class Pacer:
    """A sleeper for modelled durations. It corrects the error of each sleep in the next."""

    def __init__(self) -> None:
        self._carry_s = 0.0

    async def spend(self, duration_s: float) -> None:
        """Sleep for `duration_s`, corrected by the error of earlier sleeps."""
        wanted = duration_s + self._carry_s
        if wanted >= MIN_SLEEP_S:
            clock = asyncio.get_running_loop().time
            start = clock()
            await asyncio.sleep(wanted)
            wanted -= clock() - start
        self._carry_s = min(max(wanted, -MAX_CARRY_S), MAX_CARRY_S)


# The interval between two reads of the file.
LOOK_S: Final = 0.1


class SimFaults:
    """The faults of one simulated worker, read from a file: a slow GPU or a slow link.

    A missing file and invalid JSON mean no faults. The file may change while workers run. Demonstrations and tests of
    the diagnosis use it.

        {"decode-1": {"slow": 2.5}, "decode-2": {"link_gbps": 0.5}}
    """

    def __init__(self, file: Path | None, worker_id: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._worker_id = worker_id
        self._clock_s = clock_s
        self._looked_s = float("-inf")
        self._own: dict[str, Any] = {}

    def slow(self) -> float:
        """Return the factor by which steps take longer."""
        return self._number("slow", 1.0)

    def link_gbps(self, usual: float) -> float:
        """Return the speed of the link on which KV arrives, in gigabits per second."""
        return self._number("link_gbps", usual)

    def _number(self, name: str, usual: float) -> float:
        if self._file is None:
            return usual
        self._look()
        value = self._own.get(name)
        return float(value) if isinstance(value, int | float) and value > 0 else usual

    def _look(self) -> None:
        now_s = self._clock_s()
        if self._file is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            reported = json.loads(self._file.read_text())
            own = reported.get(self._worker_id) if isinstance(reported, dict) else None
            self._own = own if isinstance(own, dict) else {}
        except (OSError, ValueError):
            self._own = {}
