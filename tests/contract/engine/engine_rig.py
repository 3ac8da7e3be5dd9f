"""Builders of sequences for an engine under test, and checks of their outcome."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.engine.kv_port import KvHandle
from libs.engine.port import Engine, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineIntegrity, FinishReason
from libs.testing.engines.engine import EventReader, SequenceLog

BLOCK = 16
PROMPT: NDArray[np.int32] = (np.arange(75, dtype=np.int32) * 7) % 250
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, ignore_eos=True)
ROOT = b"weights, dtype, tenant"
IDLE = EngineIntegrity(0, 0, 0)
Make = Callable[..., Engine]
CORE_KINDS = ("sim", *(pytest.param(kind, marks=pytest.mark.torch) for kind in ("torch", "torch_shared")))
VLLM_KINDS = tuple(pytest.param(kind, marks=pytest.mark.vllm) for kind in ("vllm", "vllm_async"))
KINDS = (*CORE_KINDS, *VLLM_KINDS)
on_our_core = pytest.mark.parametrize("kind", CORE_KINDS, indirect=True)
"""Tests that others' capabilities exclude, or that need our own fetcher or core."""


ids = itertools.count(1 << 60, -(1 << 32) - 1)
"""Ids of sequences: large and falling, since an engine must not read meaning from them."""


def sequence(
    phase: EnginePhase = EnginePhase.BOTH,
    *,
    prompt: NDArray[np.int32] = PROMPT,
    generated: list[int] | None = None,
    output: int = 12,
    sampling: SamplingParams = GREEDY,
    root: bytes = b"",
    kv: KvHandle | None = None,
) -> EngineRequest:
    sequence_id = next(ids)
    token_ids = np.concatenate([prompt, np.array(generated or [], dtype=np.int32)])
    return EngineRequest(
        sequence_id, f"request-{sequence_id}", phase, token_ids, len(prompt), output, sampling, root, kv
    )


async def complete(engine: Engine, reader: EventReader, request: EngineRequest) -> SequenceLog:
    engine.submit(request)
    return await reader.ended(request.sequence_id)


async def prefill(engine: Engine, reader: EventReader, **request: object) -> tuple[KvHandle, list[int]]:
    """Return a handle under a lease, and the first token."""
    log = await complete(engine, reader, sequence(EnginePhase.PREFILL, **request))  # type: ignore[arg-type]
    assert log.end is not None and log.end.finish is FinishReason.PREFILLED and log.end.handle is not None
    return log.end.handle, log.token_ids


def finish(log: SequenceLog) -> FinishReason | None:
    assert log.end is not None
    return log.end.finish


LONG = np.resize(PROMPT, 800)


async def moved(engine: Engine, reader: EventReader, request: EngineRequest, after_tokens: int) -> SequenceLog:
    """Start a sequence, hand it over once it has that many tokens, and return its output until then."""
    engine.submit(request)
    await reader.tokens(request.sequence_id, after_tokens)
    engine.hand_over(request.sequence_id)
    return await reader.ended(request.sequence_id)
