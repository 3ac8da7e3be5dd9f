"""Test that KV wait in phase time is exactly the cost of a slow link."""

import numpy as np
import pytest

from libs.engine.config import EngineConfig
from libs.engine.local import LocalEngine
from libs.engine.port import EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.sim import SimRunner
from libs.runtime.clock import SystemClock
from libs.telemetry.steps import PhaseTime
from libs.testing.engines.engine import DirectFetcher, EventReader, PhaseAccount

pytestmark = pytest.mark.alone

PROMPT_TOKENS = 400
HAND_OFFS = 6
FAST_GBPS, SLOW_GBPS = 1000.0, 10.0


async def hand_offs(link_gbps: float) -> PhaseTime:
    """Return the phases of a worker's time while prompts computed elsewhere reach it one by one."""
    clock, fetcher = SystemClock(), DirectFetcher()
    config = EngineConfig(None, "sim", sim_link_gbps=link_gbps)
    source, target = (LocalEngine(SimRunner(config), config, clock) for _ in range(2))
    for name, engine in (("source", source), ("target", target)):
        await engine.start(EngineIdentity(name, 1, ""), fetcher, lambda _stage, _share: None)
        fetcher.engines[name] = engine
    account = PhaseAccount(target, clock)
    readers = EventReader(source), EventReader(target)
    try:
        handles = []
        for sequence_id in range(1, HAND_OFFS + 1):
            prompt = np.full(PROMPT_TOKENS, sequence_id, np.int32)
            source.submit(
                EngineRequest(sequence_id, "r", EnginePhase.PREFILL, prompt, PROMPT_TOKENS, 8, SamplingParams())
            )
            end = (await readers[0].ended(sequence_id)).end
            assert end is not None and end.handle is not None
            handles.append((sequence_id, np.append(prompt, end.token_ids).astype(np.int32), end.handle))
        start_ns = clock.now_ns()
        for sequence_id, token_ids, handle in handles:
            target.submit(
                EngineRequest(
                    sequence_id, "r", EnginePhase.DECODE, token_ids, PROMPT_TOKENS, 8, SamplingParams(), kv=handle
                )
            )
            await readers[1].ended(sequence_id)
        end_ns = clock.now_ns()
        for event in readers[1].events:
            account.on_event(event)
        account.cut()
        return account.phases(start_ns, end_ns)
    finally:
        for reader in readers:
            await reader.close()
        for engine in (source, target):
            await engine.close()


async def test_a_slow_link_shows_as_kv_wait_and_not_as_idle_time() -> None:
    fast, slow = await hand_offs(FAST_GBPS), await hand_offs(SLOW_GBPS)
    kv_bytes = HAND_OFFS * PROMPT_TOKENS * 131_072
    longer_ns = kv_bytes * 8 * (1 / SLOW_GBPS - 1 / FAST_GBPS)
    assert slow.kv_wait_ns - fast.kv_wait_ns > 0.8 * longer_ns
    assert slow.kv_wait_ns > slow.covered_ns / 3
    assert slow.idle_ns < slow.kv_wait_ns / 4
