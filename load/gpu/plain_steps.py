"""`python -m load.gpu.plain_steps`: measure steps of a plain Llama on one GPU by CUDA events.

They are the reference for engines and profiles. The model is matrix products, torch's SDPA and a replayed CUDA graph,
without an engine, scheduler or sampling. Cells are whole prompts, decodes by batch and context, and mixed steps. In a
mixed step, attention of the prompt and of the decodes run one after the other. A cell's time is the median of several
replays, and is saved as soon as it is measured. The result is printed as a table, then as one JSON object in the last
line.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from load.gpu.shapes import LLAMA_8B, SHAPES
from load.measure import bench_parser

PROMPTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS: Final = (256, 1024, 4096)
MIXED_PROMPTS: Final = (128, 512, 2048)
MIXED_DECODES: Final = ((16, 1024), (64, 1024), (128, 1024), (64, 4096))
# 35 GB of Llama-8B's KV.
MAX_KV_TOKENS: Final = 270_000
WARM_UPS, REPLAYS = 3, 9
BACKENDS: Final = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
# Llama-8B's head dimension.
HEAD_DIM: Final = 128


@dataclass(frozen=True, slots=True)
class Cell:
    """A step that computes a new prompt of `prompt` tokens, and decodes `batch` sequences of `context` tokens each."""

    prompt: int
    batch: int
    context: int


def cells() -> list[Cell]:
    """Return the steps to measure, in order. The parts of each mixed step are among the pure steps."""
    return [
        *(Cell(prompt, 0, 0) for prompt in PROMPTS),
        *(Cell(0, b, c) for b in BATCHES for c in CONTEXTS if b * c <= MAX_KV_TOKENS),
        *(Cell(prompt, b, c) for prompt in MIXED_PROMPTS for b, c in MIXED_DECODES),
    ]


class PlainLlama:
    """Random weights, and a forward pass over [prompt tokens; one token of each decoding sequence]."""

    def __init__(self, shape: Mapping[str, Any], device: str) -> None:
        hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.layers, self.device = shape["num_hidden_layers"], device
        width = (self.heads + 2 * self.kv_heads) * HEAD_DIM

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * 0.02

        rows = ((width, hidden), (hidden, self.heads * HEAD_DIM), (2 * inner, hidden), (hidden, inner))
        self.parts = [tuple(weight(*size) for size in rows) for _ in range(self.layers)]
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)
        self.head, self.table = weight(vocab, hidden), weight(vocab, hidden)
        self.kv = torch.zeros(0, device=device)

    def hold(self, cell: Cell) -> None:
        """Allocate the KV of the cell's decodes: [layers, 2, batch, kv_heads, context, head_dim]."""
        self.kv = torch.zeros(0, device=self.device)  # frees the previous cell's KV first, since both may not fit
        size = (self.layers, 2, cell.batch, self.kv_heads, max(cell.context, 1), HEAD_DIM)
        self.kv = torch.randn(size, dtype=torch.bfloat16, device=self.device)

    def forward(self, ids: torch.Tensor, angles: torch.Tensor, cell: Cell) -> torch.Tensor:
        """Return logits [rows, vocab] for ids [tokens] int64 and angles [tokens, 1, head_dim] (see `rotated`)."""
        x = self.table[ids]
        for layer, (qkv, out, up, down) in enumerate(self.parts):
            attended = self._attend(functional.rms_norm(x, x.shape[-1:], self.norm) @ qkv.T, angles, layer, cell)
            x = x + attended @ out.T
            gate, value = (functional.rms_norm(x, x.shape[-1:], self.norm) @ up.T).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * value) @ down.T
        last = torch.cat([x[cell.prompt - 1 : cell.prompt], x[cell.prompt :]]) if cell.prompt else x
        return functional.rms_norm(last, last.shape[-1:], self.norm) @ self.head.T

    def _attend(self, mixed: torch.Tensor, angles: torch.Tensor, layer: int, cell: Cell) -> torch.Tensor:
        """Return [tokens, heads x head_dim] for mixed [tokens, (heads + 2 kv_heads) x head_dim]."""
        tokens = len(mixed)
        q, k, v = mixed.view(tokens, -1, HEAD_DIM).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotated(q, angles), rotated(k, angles)
        found = []
        if cell.prompt:
            own = slice(0, cell.prompt)
            query, keys, values = (part[own].transpose(0, 1)[None] for part in (q, k, v))
            one = functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
            found.append(one[0].transpose(0, 1).reshape(cell.prompt, -1))
        if cell.batch:
            keys, values = self.kv[layer]
            keys[:, :, -1], values[:, :, -1] = k[cell.prompt :], v[cell.prompt :]
            # The query heads of a KV head take the dimension of query positions, because each attends to the whole
            # context.
            grouped = q[cell.prompt :].view(cell.batch, self.kv_heads, -1, HEAD_DIM)
            many = functional.scaled_dot_product_attention(grouped, keys, values)
            found.append(many.reshape(cell.batch, -1))
        return torch.cat(found) if len(found) > 1 else found[0]


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_dim] rotated by angles [tokens, 1, head_dim], which are cosines, then sines."""
    cos, sin = angles.chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def replay_ms(step: Callable[[], object], graphed: bool) -> list[float]:
    """Return the ms of several runs of `step`, measured by CUDA events.

    With `graphed`, a CUDA graph of it is replayed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.synchronize()
    run = step
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
        run()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return found


def measure(model: PlainLlama, cell: Cell) -> dict[str, Any]:
    """Return the cell's time with each attention backend that supports it. `ms` is the shortest."""
    model.hold(cell)
    tokens = cell.prompt + cell.batch
    ids = torch.randint(0, len(model.table), (tokens,), device=model.device)
    angles = torch.randn(tokens, 1, HEAD_DIM, dtype=torch.bfloat16, device=model.device)
    by_backend = {}
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend), torch.inference_mode():
                times = replay_ms(lambda: model.forward(ids, angles, cell), graphed=cell.prompt <= 2048)
        except RuntimeError as error:  # the backend does not support these shapes
            print(f"{cell}: {backend.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        by_backend[backend.name.lower()] = round(statistics.median(times), 4)
    return {
        "prompt": cell.prompt,
        "batch": cell.batch,
        "context": cell.context,
        "ms": min(by_backend.values(), default=None),
        "by_backend": by_backend,
    }


def main(options: argparse.Namespace) -> None:
    """Measure the cells in order until the time is up."""
    end_s, found = time.monotonic() + options.limit_s, []
    model = PlainLlama(SHAPES[LLAMA_8B], options.device)
    report = {"gpu": torch.cuda.get_device_name(options.device), "torch": torch.__version__, "shape": LLAMA_8B}
    print(f"{'prompt':>7}{'batch':>7}{'context':>9}{'ms':>10}")
    for cell in cells():
        if time.monotonic() > end_s:
            print("out of time", file=sys.stderr)
            break
        found.append(measure(model, cell))
        if options.out:
            options.out.write_text(json.dumps(report | {"cells": found}))
        print(f"{cell.prompt:>7}{cell.batch:>7}{cell.context:>9}{found[-1]['ms'] or 0:>10.3f}", flush=True)
    print(json.dumps(report | {"cells": found}))


def parser() -> argparse.ArgumentParser:
    made = bench_parser(__doc__, device="cuda:0", limit_s=240.0)
    made.add_argument("--out", type=Path, help="saved after each cell")
    return made


if __name__ == "__main__":
    main(parser().parse_args())
