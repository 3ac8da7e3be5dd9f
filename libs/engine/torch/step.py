"""A loaded model and its KV pool: load, sleep, wake, warm-up and step."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.guides import GuideFailed, Guides, load_guides
from libs.engine.kv_shared_pool import file_name
from libs.engine.port import EngineIdentity, Pooling, Progress, SamplingParams
from libs.engine.runner import Batch, Chunk, Sampled, without_ends
from libs.engine.torch.attention import GatherMemory, KvPool, plan_step
from libs.engine.torch.device import compute_of, device_name, variant_of
from libs.engine.torch.encoder import Encoder, encode_step, load_encoder
from libs.engine.torch.model import Adapters, block_shape, load_model, pick_device
from libs.engine.torch.sampling import sample, score
from libs.engine.torch.vision import ImageEncoder
from libs.model.info import ModelInfo, load_model_info
from libs.perfmodel.utilisation import Compute
from libs.runtime.linux import COMPUTE_SLICE_NS, ask_slice

# The number of prompt tokens that fill torch's internal caches before the first request.
WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded model without a pool, as it remains during sleep."""

    info: ModelInfo
    device: torch.device
    device_name: str
    model: Any
    guides: Future[Guides]
    adapters: Adapters
    images: ImageEncoder | None
    """The encoder of images; None for a model without vision or with an unsupported one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its pool, ready to compute."""

    info: ModelInfo
    device: torch.device
    device_name: str
    """"cpu", or "cuda:" followed by the GPU's name."""
    model: Any
    pool: KvPool
    memory: GatherMemory
    compute: Compute | None
    """The inputs for computing utilisation; None if unknown."""
    variant: str
    """A text with everything except model and device that affects step times, as in the port's Capabilities."""
    guides: Future[Guides]
    adapters: Adapters
    images: ImageEncoder | None


def load(config: EngineConfig, identity: EngineIdentity, progress: Progress) -> Loaded | Encoder:
    """Load weights, allocate the pool and warm up; a model that encodes has no pool. Raise StartupError."""
    ask_slice(COMPUTE_SLICE_NS)
    if config.model_path is None:
        raise StartupError("the torch engine needs a model folder: set its model path")
    info = load_model_info(config.model_path, config.model_name)
    if config.threads:
        torch.set_num_threads(config.threads)  # on this thread, which also runs the steps
    if info.encodes:
        return load_encoder(info, config, progress)
    device = pick_device(config.device)
    progress("loading weights", 0.0)
    guides = _read_guides(info)
    vision = info.vision if info.vision and not info.vision.unserved else None
    model = load_model(config.model_path, device, config.dtype, images=vision is not None)
    progress("loading weights", 1.0)
    images = ImageEncoder(model, config.model_path, vision, config.image_cache_mb * 2**20) if vision else None
    adapters = Adapters(model, config.adapters, config.max_adapters)
    return _ready(
        Weights(info, device, device_name(device), model, guides, adapters, images), config, identity, progress
    )


def put_away(loaded: Loaded) -> Weights:
    """Free the pool and move the weights to host memory, for `wake`. On a CPU weights stay in place."""
    loaded.pool.close()
    if loaded.device.type == "cuda":
        loaded.model.to("cpu")
        torch.cuda.empty_cache()
    loaded.adapters.drop()
    if loaded.images is not None:
        loaded.images.drop()
    names = ("info", "device", "device_name", "model", "guides", "adapters", "images")
    return Weights(*(getattr(loaded, name) for name in names))


def wake(weights: Weights, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> Loaded:
    """Move the weights back to the device, with an empty pool. Raise StartupError if there is no room."""
    progress("waking weights", 0.0)
    if weights.device.type == "cuda":
        try:
            weights.model.to(weights.device)
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            raise StartupError(f"the device has no room for {config.model_name!r} any more: {error}") from error
    progress("waking weights", 1.0)
    return _ready(weights, config, identity, progress)


def _ready(weights: Weights, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> Loaded:
    """Allocate a pool for the weights and warm up. Raise StartupError."""
    device, model = weights.device, weights.model
    progress("allocating KV", 0.0)
    place = file_name(identity.worker_id, identity.incarnation)
    file = config.kv_shared_dir / place if config.kv_shared_dir else None
    pool = KvPool(block_shape(model, config.block_size_tokens), config.kv_memory_mb, device, file)
    progress("allocating KV", 1.0)
    compute, variant = compute_of(model, pool.shape, device), variant_of(model, device)
    memory, name = GatherMemory(pool), weights.device_name
    own = (weights.guides, weights.adapters, weights.images)
    loaded = Loaded(weights.info, device, name, model, pool, memory, compute, variant, *own)
    progress("warming up", 0.0)
    try:
        _warm_up(loaded)
    except BaseException:
        pool.close()
        raise
    progress("warming up", 1.0)
    return loaded


def step(loaded: Loaded | Encoder, batch: Batch) -> dict[int, Sampled]:
    return encode_step(loaded, batch) if isinstance(loaded, Encoder) else _step(loaded, batch)


def _step(loaded: Loaded, batch: Batch) -> dict[int, Sampled]:
    chunks = batch.chunks
    if not chunks:
        return {}
    last_rows = np.cumsum([len(chunk.token_ids) for chunk in chunks]) - 1
    sampling = [
        (chunk, int(row)) for chunk, row in zip(chunks, last_rows, strict=True) if chunk.sample and not chunk.pooling
    ]
    scored = [
        (chunk, chunk.scored, int(row) + 1 - len(chunk.token_ids))
        for chunk, row in zip(chunks, last_rows, strict=True)
        if chunk.scored is not None
    ]
    rows = [row for _, row in sampling]
    broken = loaded.adapters.use(chunks)
    rows += [first + place for _, tokens, first in scored for place in range(len(tokens))]
    token_ids = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64))
    with torch.inference_mode(), _hidden_states(loaded.model, chunks) as hidden:
        plan = plan_step(chunks, loaded.pool, loaded.memory)
        output = loaded.model(
            **_inputs(loaded, token_ids.to(loaded.device), chunks),
            position_ids=plan.positions[None],
            use_cache=False,
            # The head, with its large vocabulary, runs only on rows that are sampled or scored.
            logits_to_keep=torch.tensor(rows, dtype=torch.int64, device=loaded.device),
            plan=plan,
        )
        logits = output.logits[0]  # [rows to sample, then rows to score, vocab]
        if len(logits) != len(rows):
            raise StartupError("the model ignores logits_to_keep, which the torch engine needs: choose another model")
        masks, faults = _masks(loaded, [chunk for chunk, _ in sampling])  # while a GPU computes
        sampled = sample(logits[: len(sampling)].float(), [chunk for chunk, _ in sampling], masks)
        for row, reason in faults.items():
            sampled[row].fault = reason
        for place, reason in broken.items():
            sampled_at = next((at for at, (chunk, _) in enumerate(sampling) if chunk is chunks[place]), None)
            if sampled_at is not None:
                sampled[sampled_at].fault = reason
        results = {chunk.sequence_id: token for (chunk, _), token in zip(sampling, sampled, strict=True)}
        at = len(sampling)
        for chunk, tokens, _ in scored:
            found = score(logits[at : at + len(tokens)].float(), tokens, chunk.sampling.prompt_top_logprobs)
            results.setdefault(chunk.sequence_id, Sampled(0)).prompt = found
            at += len(tokens)
        if hidden:
            _pool(hidden[0], chunks, broken, results)
        if loaded.device.type == "cuda":
            # Without this, a step that samples nothing would return before it ends on the GPU. Its time would be wrong,
            # and its blocks could be reused. Block copies run on a separate stream and do not wait.
            torch.cuda.current_stream(loaded.device).synchronize()
        loaded.pool.written()
    return results


def _inputs(loaded: Loaded, token_ids: torch.Tensor, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """Return the model's input for a row of tokens [tokens] int64: ids, or embeddings if there are images."""
    if loaded.images is None or not any(chunk.images for chunk in chunks):
        return {"input_ids": token_ids[None]}
    return {"inputs_embeds": loaded.images.embed(token_ids, chunks)[None]}


@contextmanager
def _hidden_states(model: Any, chunks: Sequence[Chunk]) -> Iterator[list[torch.Tensor]]:
    """Yield a list to which the next forward pass appends the head's input [tokens, hidden], if any chunk is pooled."""
    found: list[torch.Tensor] = []
    if not any(chunk.pooling for chunk in chunks):
        yield found
        return
    hook = model.base_model.register_forward_hook(lambda _model, _inputs, output: found.append(output[0][0]))
    try:
        yield found
    finally:
        hook.remove()


def _pool(hidden: torch.Tensor, chunks: Sequence[Chunk], broken: dict[int, str], results: dict[int, Sampled]) -> None:
    """Add the vectors of pooled chunks, or their faults, to the results. `hidden` is [tokens, hidden]."""
    first = 0
    for index, chunk in enumerate(chunks):
        end = first + len(chunk.token_ids)
        if chunk.pooling and (chunk.sample or chunk.pooling is Pooling.MEAN):
            # The sum is float32. In bfloat16, a long prompt would lose most of it.
            rows = hidden[end - 1 : end] if chunk.pooling is Pooling.LAST else hidden[first:end]
            pooled = rows.float().sum(dim=0).cpu().numpy()
            results[chunk.sequence_id] = Sampled(0, fault=broken.get(index, ""), pooled=pooled)
        first = end


def _masks(loaded: Loaded, chunks: list[Chunk]) -> tuple[dict[int, NDArray[np.bool_]], dict[int, str]]:
    """Return (masks, faults) of constrained rows.

    A mask is [vocab] 1D bool, the allowed tokens. A fault is the reason why a row cannot continue.
    """
    masks: dict[int, NDArray[np.bool_]] = {}
    faults: dict[int, str] = {}
    for row, chunk in enumerate(chunks):
        params = chunk.sampling
        if params.guide:
            try:
                masks[row] = loaded.guides.result().allowed(chunk)
            except GuideFailed as failed:
                faults[row] = str(failed)
        elif params.min_tokens:
            allowed = without_ends(chunk, loaded.info.eos_token_ids, loaded.info.vocab_size)
            if allowed is not None:
                masks[row] = allowed
    return masks, faults


def _read_guides(info: ModelInfo) -> Future[Guides]:
    """Read the vocabulary for guides on a thread while the weights load, which takes longer."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
    try:
        return thread.submit(load_guides, info)
    finally:
        thread.shutdown(wait=False)  # the thread ends after this one task


def _warm_up(loaded: Loaded) -> None:
    """Run two steps that use every kind of attention, and check that all layers write to the pool."""
    size, blocks = loaded.pool.shape.block_size, loaded.pool.blocks
    tokens = min(WARM_UP_TOKENS, (blocks - 1) * size // 2)
    table = np.arange(blocks, dtype=np.int32)
    step(loaded, Batch((_warm_up_chunk(0, 0, tokens, table[:-1]),)))
    step(loaded, Batch((_warm_up_chunk(1, 0, 1, table[-1:]), _warm_up_chunk(0, tokens, tokens, table[:-1]))))
    written = loaded.pool.tensor[0, :, 0].flatten(2).any(dim=-1).all(dim=-1)  # [layers]
    if not bool(written.all()):
        layer = int(written.int().argmin())
        raise StartupError(f"layer {layer} keeps no KV in the pool: the torch engine serves plain attention only")


def _warm_up_chunk(sequence_id: int, start: int, tokens: int, block_table: NDArray[np.int32]) -> Chunk:
    history = np.zeros(start + tokens, np.int32)
    return Chunk(
        sequence_id=sequence_id,
        token_ids=history[start:],
        start=start,
        block_table=block_table,
        sample=True,
        sampling=SamplingParams(top_p=0.9),
        history=history,
        prompt_tokens=len(history),
    )
