"""Encoders and cross-encoders in transformers: models whose tokens attend to later ones.

Each prompt is computed as a whole, and no KV remains. Blocks contain no bytes; they only limit the tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification

from libs.contracts.errors import KvMismatch, StartupError, one_line
from libs.engine.config import EngineConfig
from libs.engine.port import Pooling, Progress
from libs.engine.runner import Batch, Chunk, Sampled
from libs.engine.torch.device import device_name, variant_of
from libs.engine.torch.model import pick_device, read_model
from libs.model.info import Dense, ModelInfo

# Prompts of a forward pass are padded to the longest, which at most doubles the tokens of each.
MAX_PADDING: Final = 2


@dataclass(frozen=True, slots=True)
class NoKv:
    """A pool of blocks without bytes."""

    blocks: int
    layout: ClassVar = "none"
    nonce: ClassVar = b""

    def read(self, _blocks: NDArray[np.int32]) -> tuple[memoryview, ...]:
        return ()

    def write(self, blocks: NDArray[np.int32], data: Sequence[memoryview], _checksums: Sequence[int]) -> None:
        """Write nothing. Raise KvMismatch if there is data."""
        if data:
            raise KvMismatch(f"an encoder got bytes for {len(blocks)} KV blocks, it keeps none")

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Encoder:
    info: ModelInfo
    device: torch.device
    device_name: str
    model: Any
    pool: NoKv
    pad_token_id: int
    tells_texts_apart: bool
    """True if the model has separate embeddings for the two texts of a pair."""
    pools: frozenset[Pooling]
    variant: str
    dense: torch.nn.Module | None
    """The layers that process a pooled vector; None if there are none."""
    images: ClassVar[None] = None
    compute: ClassVar[None] = None


def load_encoder(info: ModelInfo, config: EngineConfig, progress: Progress) -> Encoder:
    """Load the model and compute one prompt as a warm-up. Raise StartupError."""
    assert info.path is not None
    if config.adapters:
        raise StartupError(f"{info.name!r} is an encoder, for which no adapters are served: start without them")
    device = pick_device(config.device)
    scores = info.embedding.pooling == "score"
    progress("loading weights", 0.0)
    kind = AutoModelForSequenceClassification if scores else AutoModel
    # The layer that computes `pooler_output` is often missing from a sentence encoder's files. No pooling here reads
    # it.
    spare = () if scores else ("pooler.",)
    model = read_model(kind, info.path, device, config.dtype, spare=spare).eval().requires_grad_(False)
    progress("loading weights", 1.0)
    own = model.config
    blocks = -(-info.request_tokens // config.block_size_tokens) * config.max_sequences
    pools = frozenset({Pooling.SCORE} if scores else {Pooling.MEAN, Pooling.CLS})
    encoder = Encoder(
        info=info,
        device=device,
        device_name=device_name(device),
        model=model,
        pool=NoKv(blocks),
        pad_token_id=getattr(own, "pad_token_id", None) or 0,
        tells_texts_apart=(getattr(own, "type_vocab_size", None) or 1) > 1,
        pools=pools,
        variant=variant_of(model, device),
        dense=_load_dense(info.embedding.dense, device),
    )
    progress("warming up", 0.0)
    _compute(encoder, [np.zeros(min(info.max_context_tokens, 64), np.int32)], [0])
    progress("warming up", 1.0)
    return encoder


def _load_dense(layers: Sequence[Dense], device: torch.device) -> torch.nn.Module | None:
    """Return the layers in float32; None if there are none. Raise StartupError if files are missing or do not fit."""
    parts: list[torch.nn.Module] = []
    for layer in layers:
        file = layer.folder / "model.safetensors"
        try:
            linear = torch.nn.Linear(layer.inputs, layer.outputs, bias=layer.bias)
            if file.is_file():
                weights = load_file(file)
            else:
                file = layer.folder / "pytorch_model.bin"
                weights = torch.load(file, map_location="cpu", weights_only=True)
            linear.load_state_dict({name.removeprefix("linear."): each for name, each in weights.items()})
        except Exception as error:  # torch raises anything from RuntimeError to UnpicklingError
            raise StartupError(f"cannot read the module Dense in {file}: {one_line(error, 200)}") from error
        parts += [linear, getattr(torch.nn, layer.activation)()]
    return torch.nn.Sequential(*parts).to(device).eval().requires_grad_(False) if parts else None


def encode_step(encoder: Encoder, batch: Batch) -> dict[int, Sampled]:
    """Compute whole prompts, and return each one's vector or score by sequence id."""
    most = encoder.info.max_context_tokens  # only prompts of trial steps are longer, and their vectors are not used
    prompts = [chunk.token_ids[:most] for chunk in batch.chunks]
    results: dict[int, Sampled] = {}
    for group in groups_of([len(each) for each in prompts]):
        chunks = [batch.chunks[place] for place in group]
        tokens = [prompts[place] for place in group]
        output = _compute(encoder, tokens, [chunk.second_from for chunk in chunks])
        results |= {
            chunk.sequence_id: Sampled(0, pooled=_pooled(rows, chunk, len(own), encoder.dense))
            for chunk, rows, own in zip(chunks, output, tokens, strict=True)
        }
    return results


def groups_of(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of `lengths` in groups. Padding makes each at most `MAX_PADDING` times as long. Pure."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not groups or lengths[groups[-1][0]] > MAX_PADDING * lengths[place]:
            groups.append([])
        groups[-1].append(place)
    return groups


def _compute(encoder: Encoder, prompts: Sequence[NDArray[np.int32]], second_from: Sequence[int]) -> torch.Tensor:
    """Return [prompts, longest, hidden] float32 last states, or a head's [prompts, labels]."""
    longest = max(map(len, prompts))
    shape = (len(prompts), longest)
    # [prompts, longest] 2D int64, padded on the right
    ids, mask, types = np.full(shape, encoder.pad_token_id), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, (tokens, second) in enumerate(zip(prompts, second_from, strict=True)):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        types[row, second : len(tokens)] = 1 if second else 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if encoder.tells_texts_apart:
        inputs["token_type_ids"] = types
    with torch.inference_mode():
        output = encoder.model(**{name: torch.from_numpy(each).to(encoder.device) for name, each in inputs.items()})
        found = output.logits if Pooling.SCORE in encoder.pools else output.last_hidden_state
        return found.float()


def _pooled(rows: torch.Tensor, chunk: Chunk, tokens: int, dense: torch.nn.Module | None) -> NDArray[np.float32] | None:
    """Return the vector of one prompt from its last states [longest, hidden], or its head's output [labels]."""
    match chunk.pooling:
        case Pooling.SCORE:
            pooled = rows
        case Pooling.CLS:
            pooled = rows[0]
        case Pooling.MEAN:
            pooled = rows[:tokens].sum(dim=0)  # the core divides the sum
        case _:
            return None
    if dense is not None:
        divisor = tokens if chunk.pooling is Pooling.MEAN else 1  # the core divides by it later
        with torch.inference_mode():
            pooled = dense(pooled / divisor) * divisor
    found: NDArray[np.float32] = pooled.cpu().numpy()
    return found
