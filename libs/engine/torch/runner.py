"""The torch runner: transformers' model classes over a paged KV pool, on a CPU or one GPU.

Importing torch takes seconds. `load` therefore imports it, on the thread that later computes.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import Capabilities, EngineIdentity, Pooling, Progress, PromptImage
from libs.engine.runner import Batch, ImageCounts, Sampled

if TYPE_CHECKING:
    from libs.engine.torch.encoder import Encoder
    from libs.engine.torch.step import Loaded, Weights

P = ParamSpec("P")
T = TypeVar("T")


class TorchRunner:
    """A runner that does all of torch's work on one thread, so that the event loop stays free.

    Block copies run on the caller's thread, since no running step writes the blocks that they touch (see the port).
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._loaded: Loaded | Encoder | None = None
        self._weights: Weights | None = None
        """The weights in host memory while the runner sleeps, else None."""

    @property
    def name(self) -> str:
        return "torch"

    @property
    def device(self) -> str:
        """ "cpu", or "cuda:" and the GPU's name. Valid after `load`."""
        return self._ready.device_name

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sequence. Valid after `load`."""
        return self._ready.info.eos_token_ids

    async def load(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        loop = asyncio.get_running_loop()

        def report(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(progress, stage, fraction)

        self._loaded = await self._on_thread(_load, self._config, identity, report)
        return self._capabilities(self._loaded)

    def _capabilities(self, loaded: "Loaded | Encoder") -> Capabilities:
        if loaded.info.encodes:
            return self._encoder_capabilities(cast("Encoder", loaded))
        pool = cast("Loaded", loaded).pool
        return Capabilities(
            block_size_tokens=pool.shape.block_size,
            kv_blocks=pool.blocks,
            kv_block_bytes=pool.shape.block_bytes,
            max_context_tokens=loaded.info.max_context_tokens,
            max_sequences=self._config.max_sequences,
            kv_layout=pool.shape.layout,
            vocab_size=loaded.info.vocab_size,
            streams_kv=True,
            named_kv=True,
            scores_prompts=True,
            pools=frozenset({Pooling.LAST, Pooling.MEAN}),
            hands_over_running_kv=True,
            sleeps=True,
            loads_adapters=True,
            images=loaded.images is not None,
            kv_nonce=pool.nonce,
            chunk_tokens=self._config.prefill_chunk_tokens,
            compute=loaded.compute,
            variant=loaded.variant,
        )

    def _encoder_capabilities(self, encoder: "Encoder") -> Capabilities:
        return Capabilities(
            block_size_tokens=self._config.block_size_tokens,
            kv_blocks=encoder.pool.blocks,
            kv_block_bytes=1,  # no block has bytes, but readers divide by the size
            max_context_tokens=encoder.info.request_tokens,
            max_sequences=self._config.max_sequences,
            kv_layout=encoder.pool.layout,
            vocab_size=encoder.info.vocab_size,
            pools=encoder.pools,
            generates=False,
            whole_prompts=True,
            chunk_tokens=max(self._config.prefill_chunk_tokens, encoder.info.max_context_tokens),
            variant=encoder.variant,
        )

    async def sleep(self) -> None:
        """Move the weights to host memory and free the pool. On a CPU the weights stay where they are."""
        self._weights = await self._on_thread(_put_away, cast("Loaded", self._ready))
        self._loaded = None

    async def wake(self, identity: EngineIdentity, progress: Progress) -> Capabilities:
        """Move the weights back to the device, allocate a new pool and warm up. Raise StartupError."""
        if self._weights is None:
            raise RuntimeError("the runner does not sleep")
        loop = asyncio.get_running_loop()

        def report(stage: str, fraction: float) -> None:
            loop.call_soon_threadsafe(progress, stage, fraction)

        self._loaded = await self._on_thread(_wake, self._weights, self._config, identity, report)
        self._weights = None
        return self._capabilities(self._loaded)

    async def run(self, batch: Batch) -> dict[int, Sampled]:
        return await self._on_thread(_step, self._ready, batch)

    @property
    def image_counts(self) -> ImageCounts:
        images = self._loaded.images if self._loaded else None
        return images.counts if images else ImageCounts()

    def unencoded(self, images: Sequence[PromptImage]) -> list[PromptImage]:
        encoder = self._ready.images
        return [each for each in images if encoder is None or each.span.digest not in encoder]

    async def encode(self, images: Sequence[PromptImage]) -> dict[bytes, str]:
        encoder = self._ready.images
        assert encoder is not None, "capabilities say so"
        return await self._on_thread(encoder.encode, images)

    def read_blocks(self, blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        """Return the bytes of each block, as views of the pool on a CPU and as a copy otherwise."""
        return self._ready.pool.read(blocks)

    def write_blocks(self, blocks: NDArray[np.int32], data: Sequence[memoryview], checksums: Sequence[int]) -> None:
        self._ready.pool.write(blocks, data, checksums)

    async def transfer(self, data_bytes: int) -> None:
        # The link is real: when the bytes are here, they have already taken their time.
        ...

    async def close(self) -> None:
        """Wait for the running step, then free the device. Idempotent."""
        await asyncio.to_thread(self._thread.shutdown)
        if self._loaded is not None:
            self._loaded.pool.close()
        self._loaded = self._weights = None

    @property
    def _ready(self) -> "Loaded | Encoder":
        if self._loaded is None:
            raise RuntimeError("the runner is not loaded")
        return self._loaded

    async def _on_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on torch's thread. A cancelled caller waits for its end, because it cannot be stopped."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.gather(future, return_exceptions=True)
            raise


def _load(config: EngineConfig, identity: EngineIdentity, progress: Progress) -> "Loaded | Encoder":
    progress("importing torch", 0.0)
    try:
        from libs.engine.torch.step import load  # noqa: PLC0415
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(
            f"the torch engine lacks a package ({reason}): pip install 'fulcrum-serving[torch]'"
        ) from error
    progress("importing torch", 1.0)
    return load(config, identity, progress)


def _step(loaded: "Loaded | Encoder", batch: Batch) -> dict[int, Sampled]:
    from libs.engine.torch.step import step  # noqa: PLC0415

    return step(loaded, batch)


def _put_away(loaded: "Loaded") -> "Weights":
    from libs.engine.torch.step import put_away  # noqa: PLC0415

    return put_away(loaded)


def _wake(weights: "Weights", config: EngineConfig, identity: EngineIdentity, progress: Progress) -> "Loaded":
    from libs.engine.torch.step import wake  # noqa: PLC0415

    return wake(weights, config, identity, progress)
