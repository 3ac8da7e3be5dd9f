"""`make bench-engine`: compare the torch engine with plain transformers, in tokens a second.

Each round times both sides of each case one right after the other, and the first side alternates. A case's ratio is the
median over rounds. The result is printed to stdout as a table, then as one JSON object in the last line. Progress goes
to stderr.
"""

import argparse
import asyncio
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GenerationConfig

from libs.engine.config import EngineConfig
from libs.engine.local import make_engine
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.engine.torch.model import pick_dtype
from libs.runtime.clock import SystemClock
from libs.testing.engines.engine import EventReader
from libs.testing.engines.real_model import real_model_folder
from load.measure import bench_parser
from load.setup import start_engine

LONG_TOKENS = 1500
PREFIX_TOKENS, NEW_TOKENS = 1024, 512
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Side = Callable[[], Awaitable[int]]
"""A function that does the work once, and returns its number of tokens."""


@dataclass
class Case:
    """The two sides of one comparison, with the tokens a second of each round."""

    name: str
    aim: float | None
    engine: Side
    plain: Side
    rates: dict[str, list[float]] = field(default_factory=lambda: {"engine": [], "plain": []})

    @property
    def ratio(self) -> float:
        """The median over rounds of the engine's rate over the plain one's."""
        pairs = zip(self.rates["engine"], self.rates["plain"], strict=True)
        return statistics.median(engine / plain for engine, plain in pairs)

    def median(self, side: str) -> float:
        return statistics.median(self.rates[side])


class Bench:
    """An engine and a plain model over the same weights."""

    def __init__(self, engine: Engine, model: Any, options: argparse.Namespace) -> None:
        self._engine = engine
        self._reader = EventReader(engine)
        self._model = model
        self._options = options
        self._ids = itertools.count(1)
        self._random = np.random.default_rng(3)
        self._prefix = self.prompts(1, PREFIX_TOKENS)
        self._prefix_kv: Any = None

    def prompts(self, count: int, tokens: int) -> NDArray[np.int64]:
        """Return [count, tokens] int64: new random prompts, so that none is cached. Equal lengths need no padding."""
        return self._random.integers(100, 40_000, (count, tokens))

    async def run_engine(self, rows: NDArray[np.int64], output_tokens: int, root: bytes = b"") -> None:
        """Submit prompts [batch, tokens] at once, and wait for their last tokens.

        With a `root`, prefixes are reused.
        """
        tokens = rows.shape[1]
        requests = [
            EngineRequest(
                next(self._ids), "bench", EnginePhase.BOTH, row.astype(np.int32), tokens, output_tokens, GREEDY, root
            )
            for row in rows
        ]
        for request in requests:
            self._engine.submit(request)
        for request in requests:
            await self._reader.ended(request.sequence_id)

    def generate(self, batch: int, prompt_tokens: int) -> None:
        """Run transformers' `generate` on a batch without padding."""
        ids = torch.from_numpy(self.prompts(batch, prompt_tokens)).to(self._model.device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self._options.output_tokens,
            pad_token_id=0,
        )

    def generate_batch(self, batch: int) -> None:
        """Run transformers' own continuous batching on a batch."""
        rows = [row.tolist() for row in self.prompts(batch, self._options.prompt_tokens)]
        config = GenerationConfig(do_sample=False, max_new_tokens=self._options.output_tokens, eos_token_id=-1)
        found = self._model.generate_batch(rows, generation_config=config, progress_bar=False)
        assert len(found) == batch, "generate_batch lost requests"

    def after_prefix(self) -> NDArray[np.int64]:
        """Return [1, tokens] int64: the prefix that these prompts share, and `NEW_TOKENS` new tokens."""
        return np.concatenate([self._prefix, self.prompts(1, NEW_TOKENS)], axis=1)

    def forward_after_prefix(self) -> None:
        """Run one forward pass over `NEW_TOKENS` new tokens after a copy of the prefix's KV."""
        with torch.inference_mode():
            if self._prefix_kv is None:
                ids = torch.from_numpy(self._prefix).to(self._model.device)
                self._prefix_kv = self._model(ids, use_cache=True, logits_to_keep=1).past_key_values
            ids = torch.from_numpy(self.prompts(1, NEW_TOKENS)).to(self._model.device)
            kv = copy.deepcopy(self._prefix_kv)
            self._model(ids, past_key_values=kv, use_cache=True, logits_to_keep=1).logits.argmax().item()

    def forward(self, tokens: int) -> None:
        """Run one forward pass over a whole prompt, and compute only its last logits."""
        with torch.inference_mode():
            ids = torch.from_numpy(self.prompts(1, tokens)).to(self._model.device)
            self._model(ids, use_cache=False, logits_to_keep=1).logits.argmax().item()

    async def close(self) -> None:
        await self._engine.close()
        await self._reader.close()


def engine_side(bench: Bench, batch: int, prompt: int, output: int) -> Side:
    """Return the engine's side with new prompts. With a single output token, it measures the prompt's tokens."""

    async def run() -> int:
        await bench.run_engine(bench.prompts(batch, prompt), output)
        return prompt if output == 1 else batch * output

    return run


def cases(bench: Bench, options: argparse.Namespace) -> list[Case]:
    async def engine_after_prefix() -> int:
        await bench.run_engine(bench.after_prefix(), 1, b"bench")
        return NEW_TOKENS

    def plain(work: Callable[..., None], *arguments: int, counted: int) -> Side:
        async def run() -> int:
            work(*arguments)
            return counted

        return run

    found = []
    for batch in (1, 8):
        made = batch * options.output_tokens
        ours = engine_side(bench, batch, options.prompt_tokens, options.output_tokens)
        theirs = plain(bench.generate, batch, options.prompt_tokens, counted=made)
        found.append(Case(f"decode, batch {batch}, against generate", 1.0, ours, theirs))
        if batch > 1 and options.continuous:
            name = f"decode, batch {batch}, against generate_batch"
            found.append(Case(name, None, ours, plain(bench.generate_batch, batch, counted=made)))
    for tokens in (128, 512):
        ours = engine_side(bench, 1, tokens, 1)
        theirs = plain(bench.forward, tokens, counted=tokens)
        found.append(Case(f"prefill, {tokens} tokens, against forward", 0.9, ours, theirs))
    if options.long:
        made = options.output_tokens
        ours = engine_side(bench, 1, LONG_TOKENS, made)
        theirs = plain(bench.generate, 1, LONG_TOKENS, counted=made)
        found.append(Case(f"{LONG_TOKENS}-token prompt and decode, against generate", None, ours, theirs))
        name = f"prefill, {NEW_TOKENS} tokens after {PREFIX_TOKENS} cached"
        found.append(Case(name, None, engine_after_prefix, plain(bench.forward_after_prefix, counted=NEW_TOKENS)))
    return found


def cases_beside(vllm: Bench, torch_engine: Bench, options: argparse.Namespace) -> list[Case]:
    """Return the cases that compare vLLM's engine with the torch engine."""
    shapes = [(f"decode, batch {batch}", batch, options.prompt_tokens, options.output_tokens) for batch in (1, 8)]
    shapes += [(f"prefill, {tokens} tokens", 1, tokens, 1) for tokens in (128, 512)]
    return [
        Case(f"{name}, vllm against torch", None, engine_side(vllm, *shape), engine_side(torch_engine, *shape))
        for name, *shape in shapes
    ]


async def measure(all_cases: list[Case], rounds: int) -> list[Case]:
    """Time every case in every round, after an uncounted one. A case with a side that cannot run is left out."""
    good = []
    for case in all_cases:
        try:
            await case.engine()
            await case.plain()
            good.append(case)
        except Exception as error:  # optional parts of libraries may fail in any way
            print(f"left out: {case.name} ({type(error).__name__}: {error})", file=sys.stderr)
    for turn in range(rounds):
        for case in good:
            sides = [("engine", case.engine), ("plain", case.plain)]
            for name, side in sides if turn % 2 else reversed(sides):
                start = time.perf_counter()
                tokens = await side()
                case.rates[name].append(tokens / (time.perf_counter() - start))
            engine, plain = case.rates["engine"][-1], case.rates["plain"][-1]
            print(
                f"{turn + 1}/{rounds} {case.name}: {engine:.1f} / {plain:.1f} = {engine / plain:.2f}", file=sys.stderr
            )
    return good


def report(done: list[Case], device: str, options: argparse.Namespace) -> None:
    print(f"{'case':<50}{'engine tok/s':>14}{'plain tok/s':>14}{'ratio':>8}{'aim':>6}")
    for case in done:
        aim = f"{case.aim:.1f}" if case.aim else ""
        print(f"{case.name:<50}{case.median('engine'):>14.1f}{case.median('plain'):>14.1f}{case.ratio:>8.2f}{aim:>6}")
    result = {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "cases": [{"name": c.name, "aim": c.aim, "ratio": round(c.ratio, 3), **c.rates} for c in done],
    }
    print(json.dumps(result))


async def main(options: argparse.Namespace) -> None:
    folder = real_model_folder()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = EngineConfig(folder, "bench", device=options.device, threads=options.threads)
    engine = await started("torch", config)
    device = engine.device.split(":")[0]
    dtype = pick_dtype("auto", torch.device(device))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    benches = [Bench(engine, model, options)]
    try:
        wanted = [] if options.vllm else cases(benches[0], options)
        if options.vllm:
            own = replace(config, block_size_tokens=32, vllm_arguments={"max_model_len": 2048})
            benches.append(Bench(await started("vllm", own), model, options))
            wanted = cases_beside(benches[1], benches[0], options)
        report(await measure(wanted, options.rounds), engine.device, options)
    finally:
        for bench in benches:
            await bench.close()


async def started(name: str, config: EngineConfig) -> Engine:
    return await start_engine(make_engine(name, config, SystemClock()))


if __name__ == "__main__":
    parser = bench_parser(
        __doc__, rounds=5, threads=(0, "of both sides; 0: torch's default"), device="auto", prompt_tokens=64,
        output_tokens=32, continuous=(False, "also against transformers' continuous batching"),
        vllm=(False, "instead, vLLM's engine against torch's (its environment)"),
        long=(False, "also prompts of 1,500 tokens, and chunks after a prefix"),
    )  # fmt: skip
    asyncio.run(main(parser.parse_args()))
