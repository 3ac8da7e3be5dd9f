"""Test that the lab's engine core takes the same steps over counted tokens as over real ones."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.runner import Sampled
from libs.lab.cluster.core import LabCore
from libs.lab.cluster.sequence import CountedRequest, CountedTokens
from libs.policy.step_time import StepTimeModel

BLOCK = 4
MODEL = StepTimeModel(2e6, 20_000, 0.7, 5e6, 31_000, 53.0, 0.3)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

drawn_requests = st.lists(
    st.tuples(
        st.integers(0, 30),  # ms
        st.integers(1, 60),  # prompt
        st.integers(1, 30),  # output
        st.integers(0, 3),  # prefix
        st.booleans(),  # yields
    ),
    min_size=1,
    max_size=12,
)
aborts = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 11)), max_size=4)


def capabilities(blocks: int) -> Capabilities:
    return Capabilities(
        BLOCK, blocks, 100, 1000, 6, "layout", hands_over_running_kv=True, streams_kv=True, chunk_tokens=24
    )


def core(kind: type[Core], blocks: int, guard: bool) -> Core:
    config = EngineConfig(None, "m", prefill_chunk_tokens=24, block_size_tokens=BLOCK)
    count, identity = iter(range(1, 10_000)), EngineIdentity("w", 1, "w")

    def handle(size: int) -> bytes:
        return next(count).to_bytes(size, "big")

    made = (
        LabCore(config, capabilities(blocks), identity, handles=handle)
        if kind is LabCore
        else Core(config, capabilities(blocks), frozenset(), identity, random_bytes=handle)
    )
    if guard:
        made.set_step_time(MODEL)
    return made


def tokens_of(prompt: int, prefix: int, number: int) -> list[int]:
    shared = min(prefix * 8, prompt)
    return [prefix + 1] * shared + [100 + number] * (prompt - shared)


def real(number: int, prompt: int, output: int, prefix: int, *, yields: bool) -> EngineRequest:
    ids = np.array(tokens_of(prompt, prefix, number), dtype=np.int32)
    return EngineRequest(
        number,
        str(number),
        EnginePhase.BOTH,
        ids,
        prompt,
        output,
        GREEDY,
        b"root",
        tpot_target_ns=9_000_000,
        yields=yields,
    )


def counted(request: EngineRequest, output: int) -> CountedRequest:
    ids, full = list(map(int, request.token_ids)), request.prompt_tokens // BLOCK
    keys = [repr(ids[: (place + 1) * BLOCK]).encode() for place in range(full)]
    return CountedRequest(
        request.sequence_id, request.request_id, request.phase, CountedTokens(len(ids)),  # type: ignore[arg-type]
        request.prompt_tokens, request.max_output_tokens, request.sampling, request.chain_root,
        tpot_target_ns=request.tpot_target_ns, yields=request.yields, output_tokens=output + 1, keys=keys,
    )  # fmt: skip


def history(made: Core, drawn: Any, aborted: Any) -> list[Any]:
    """Return all steps with their times, and the outcome of each sequence."""
    found: list[Any] = []
    at_ns, arrivals = 0, []
    for number, (gap_ms, prompt, output, prefix, yields) in enumerate(drawn):
        at_ns += gap_ms * 1_000_000
        request = real(number + 1, prompt, output, prefix, yields=yields)
        arrivals.append((at_ns, counted(request, output) if isinstance(made, LabCore) else request))
    gone = sorted((at_ms * 1_000_000, place + 1) for at_ms, place in aborted)
    now_ns = 1
    for _ in range(5000):
        while arrivals and arrivals[0][0] <= now_ns:
            made.submit(arrivals.pop(0)[1], now_ns)
        while gone and gone[0][0] <= now_ns:
            made.abort(gone.pop(0)[1], now_ns)
        batch = made.plan(now_ns)
        if batch is None:
            if not arrivals:
                break
            now_ns = arrivals[0][0] + 1
            continue
        made.begin(batch, now_ns)
        found.append((now_ns, batch.work, [chunk.sequence_id for chunk in batch.chunks]))
        now_ns += round(MODEL.step_ns(batch.work))
        made.apply(batch, {c.sequence_id: Sampled(1000 + c.sequence_id) for c in batch.chunks if c.sample}, now_ns)
        event = made.take_event()
        outputs = event.outputs if event else ()
        found += [(each.sequence_id, len(each.token_ids), each.finish, each.cached_tokens) for each in outputs]
        load = made.load()
        found.append(replace(load, reported_to_unix_ns=0))
    return found


@settings(max_examples=150)
@given(drawn_requests, aborts, st.sampled_from([23, 30, 500]), st.booleans())
def test_counted_and_real_tokens_give_the_same_steps(drawn: Any, aborted: Any, blocks: int, guard: bool) -> None:
    lab, live = (history(core(kind, blocks, guard), drawn, aborted) for kind in (LabCore, Core))
    assert lab == live
