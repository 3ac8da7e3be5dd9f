"""Tests of workers over real gRPC with the sim engine, as gateways and other workers see them."""

import itertools

import pytest

from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.step_row import step_rows
from libs.engine.offers import RETRY_MS
from libs.engine.port import EngineRequest
from libs.testing.workers.hosts import GatewayProbe, eventually, gateway_probe, local_worker, submit
from tests.contract.worker.serving_rig import BLOCK, PROMPT, is_clean


async def split(prefill: GatewayProbe, decode: GatewayProbe, sequence: int, *, output: int = 8) -> list[int]:
    """Prefill on one worker, decode on the other, and return all output tokens."""
    await prefill.submit(submit(sequence, pb.PHASE_PREFILL, PROMPT, output=output))
    prefilled = await prefill.event(sequence, "prefilled")
    first = prefill.tokens[sequence]
    both = submit(sequence, pb.PHASE_DECODE, [*PROMPT, *first], output=output, prompt_tokens=len(PROMPT))
    both.kv.CopyFrom(prefilled.kv)
    await decode.submit(both)
    await decode.event(sequence, "finished")
    return first + decode.tokens[sequence]


async def test_a_sequence_decoded_elsewhere_has_the_same_tokens_as_on_one_worker() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode") as b,
        local_worker("mixed-0", "mixed", budget_tokens=64) as c,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
        gateway_probe(c) as whole,
    ):
        tokens = await split(prefill, decode, 1)
        await whole.submit(submit(1, pb.PHASE_BOTH, PROMPT))
        finished = await whole.event(1, "finished")
        assert tokens == whole.tokens[1]
        assert (len(tokens), finished.output_tokens) == (8, 8)
        for worker in (a, b, c):
            await eventually(lambda worker=worker: is_clean(worker))


async def test_a_sequence_id_combines_the_gateways_number_and_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    async with local_worker("mixed-0", "mixed", budget_tokens=64) as worker:
        submits = worker.host.engine.submit

        def noting(request: EngineRequest) -> None:
            taken.append(request.sequence_id)
            submits(request)

        monkeypatch.setattr(worker.host.engine, "submit", noting)
        async with gateway_probe(worker, "one") as one, gateway_probe(worker, "other") as other:
            number = 0xFFFFFFFF
            await one.submit(submit(number, pb.PHASE_BOTH, PROMPT, output=5))
            await other.submit(submit(number, pb.PHASE_BOTH, PROMPT, output=7))
            await one.event(number, "finished")
            await other.event(number, "finished")
            assert (len(one.tokens[number]), len(other.tokens[number])) == (5, 7)
            await one.submit(submit(number, pb.PHASE_BOTH, PROMPT, output=5))  # its number is free again
            await one.until(lambda: len(one.tokens[number]) == 10)
        async with gateway_probe(worker, "one") as again:
            await again.submit(submit(1, pb.PHASE_BOTH, PROMPT))
            await again.event(1, "finished")
        assert sorted(taken) == [1 << 32 | number, 1 << 32 | number, 2 << 32 | number, 3 << 32 | 1]


async def test_decode_receives_every_block_and_computes_at_most_one_prompt_token() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode") as b,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
    ):
        await split(prefill, decode, 1)
        await eventually(lambda: any(batch.kv_transfers for batch in b.batches()))
        (transfer,) = [t for batch in b.batches() for t in batch.kv_transfers]
        block_bytes = b.host.engine.capabilities.kv_block_bytes
        assert transfer.blocks == -(-len(PROMPT) // BLOCK)
        assert transfer.bytes == transfer.blocks * block_bytes
        assert (transfer.from_worker_id, transfer.prompt_tokens) == ("prefill-0", len(PROMPT))
        assert transfer.prompt_tokens_computed <= 1
        await eventually(lambda: sum(s.decode_sequences for s in b.steps()) >= 6)
        assert sum(s.prefill_tokens for s in b.steps() if s.end_unix_ns) <= 1
        finished = await decode.event(1, "finished")
        assert (finished.kv_bytes_received, finished.computed_prompt_tokens <= 1) == (transfer.bytes, True)
        assert any(event.HasField("kv_pulling") for event in decode.events[1])


async def test_a_streamed_hand_off_overlaps_with_the_prompt_and_gives_the_same_tokens() -> None:
    slow = {"sim_speedup": 0.5, "prefill_chunk_tokens": 16}
    async with (
        local_worker("prefill-0", "prefill", **slow) as a,
        local_worker("decode-0", "decode") as b,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
    ):
        assert a.host.worker().capabilities.streams_kv
        await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        streamed = submit(1, pb.PHASE_DECODE, PROMPT)
        streamed.kv.CopyFrom((await prefill.event(1, "kv_opened")).kv)
        await decode.submit(streamed)
        await decode.event(1, "kv_pulling")
        assert not prefill.tokens[1]  # the prompt is not computed yet
        await prefill.event(1, "prefilled")
        first = prefill.tokens[1]
        assert len(first) == 1
        proceeds = [pb.Proceed(sequence=1, token_ids=pack_u32(first)), pb.Proceed(sequence=77)]
        await decode.send(pb.GatewayFrame(proceeds=proceeds))
        finished = await decode.event(1, "finished")
        assert finished.output_tokens == 7
        await eventually(lambda: is_clean(a) and is_clean(b))
        assert first + decode.tokens[1] == await split(prefill, decode, 2)
        await eventually(lambda: any(batch.kv_waits for batch in b.batches()))


async def test_a_prompt_aborted_while_it_streams_fails_its_receiver_with_kv_lost() -> None:
    async with (
        local_worker("prefill-0", "prefill", sim_speedup=0.2, prefill_chunk_tokens=16) as a,
        local_worker("decode-0", "decode") as b,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
    ):
        await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        streamed = submit(1, pb.PHASE_DECODE, PROMPT)
        streamed.kv.CopyFrom((await prefill.event(1, "kv_opened")).kv)
        await decode.submit(streamed)
        await decode.event(1, "kv_pulling")
        await prefill.send(pb.GatewayFrame(aborts=pack_u32([1])))
        assert (await decode.event(1, "failed")).code == pb.FAILURE_CODE_KV_LOST
        await eventually(lambda: is_clean(a) and is_clean(b))


async def test_telemetry_spans_are_contiguous_and_contain_every_step_once() -> None:
    async with local_worker("mixed-0", "mixed", budget_tokens=64) as worker, gateway_probe(worker) as gateway:
        await gateway.submit(*(submit(i, pb.PHASE_BOTH, PROMPT[i:], output=40) for i in range(1, 6)))
        for i in range(1, 6):
            await gateway.event(i, "finished")
        reported = len(worker.batches())
        await eventually(lambda: len(worker.batches()) > reported)
    batches = worker.batches()
    assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
    for earlier, later in itertools.pairwise(batches):
        assert earlier.covered_to_unix_ns == later.covered_from_unix_ns
    for batch in batches:
        for step in step_rows(batch.steps):
            assert batch.covered_from_unix_ns <= step.start_unix_ns < batch.covered_to_unix_ns
            assert step.end_unix_ns <= batch.covered_to_unix_ns
    steps = [step for batch in batches for step in step_rows(batch.steps)]
    starts = [step.start_unix_ns for step in steps]
    assert len(set(starts)) == len(starts)
    assert sum(s.prefill_tokens for s in steps) == sum(len(PROMPT) - i for i in range(1, 6))


async def test_registration_and_kv_index_follow_the_worker() -> None:
    async with local_worker("prefill-0", "prefill") as worker, gateway_probe(worker) as gateway:
        await eventually(lambda: worker.registry.seen)
        seen = worker.registry.seen[0]
        assert seen is not None
        assert (seen.id, seen.address, seen.state) == ("prefill-0", worker.address, common.WORKER_STATE_READY)
        assert seen.assignment.epoch == 1
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        await gateway.event(1, "prefilled")
        await eventually(lambda: len(worker.index.blocks) == len(PROMPT) // BLOCK)
    assert worker.registry.seen[-1] is None
    assert not worker.index.blocks


async def test_work_that_does_not_fit_the_role_is_refused_with_the_current_epoch() -> None:
    async with local_worker("decode-0", "decode") as worker, gateway_probe(worker) as gateway:
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        refused = await gateway.event(1, "refused")
        assert (refused.code, refused.epoch) == (pb.REFUSAL_CODE_STALE_ROLE, 1)
        await gateway.submit(submit(2, pb.PHASE_BOTH, PROMPT))
        assert (await gateway.event(2, "refused")).code == pb.REFUSAL_CODE_STALE_ROLE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token_ids": b"garbage"}, "whole number of uint32"),
        ({"token_ids": pack_u32([2**32 - 1])}, "2**31"),
        ({"token_ids": pack_u32([5000]), "prompt_tokens": 1}, ""),
        ({"model": "unheard-of"}, "this worker has model 'sim'"),
        ({"prompt_tokens": 101}, "prompt_tokens is 101 of 100"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"adapter": "lora"}, "this worker has no adapter 'lora'"),
        ({"phase": pb.PHASE_UNSPECIFIED}, "phase is missing"),
        ({"phase": pb.PHASE_DECODE}, "needs kv"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "sampling"),
        ({"token_ids": pack_u32([1] * 9000), "prompt_tokens": 9000}, ""),
    ],
)
async def test_an_invalid_submit_is_refused_and_the_stream_continues(fields: dict[str, object], said: str) -> None:
    async with local_worker("mixed-0", "mixed", budget_tokens=64) as worker, gateway_probe(worker) as gateway:
        await gateway.submit(submit(1, pb.PHASE_BOTH, PROMPT, **fields))
        refused = await gateway.event(1, "refused")
        assert refused.code == pb.REFUSAL_CODE_INVALID
        assert said in refused.detail
        await gateway.submit(submit(2, pb.PHASE_BOTH, PROMPT))
        await gateway.event(2, "finished")
        await eventually(lambda: is_clean(worker))


async def test_a_submit_without_credit_is_refused_for_capacity() -> None:
    async with local_worker("prefill-0", "prefill") as worker, gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits == 8)
        await gateway.send(pb.GatewayFrame(submits=[submit(i, pb.PHASE_PREFILL, PROMPT) for i in range(1, 11)]))
        codes = [(await gateway.event(i, "refused")).code for i in (9, 10)]
        assert codes == [pb.REFUSAL_CODE_NO_CAPACITY] * 2
        for i in range(1, 9):
            await gateway.event(i, "prefilled")


async def test_a_gateway_that_dies_frees_its_sequences() -> None:
    async with local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1.0) as worker:
        async with gateway_probe(worker) as gateway:
            await gateway.submit(*(submit(i, pb.PHASE_BOTH, PROMPT, output=4000) for i in range(1, 4)))
            await gateway.until(lambda: len(gateway.tokens) == 3)
        await eventually(lambda: is_clean(worker), within_s=1.0)
        await eventually(lambda: not worker.host.integrity().attached_gateways)


async def test_an_abort_ends_a_sequence_and_a_held_prompt() -> None:
    async with (
        local_worker("mixed-0", "mixed", budget_tokens=64, sim_speedup=1.0) as mixed,
        local_worker("prefill-0", "prefill") as prefill,
        gateway_probe(mixed) as first,
        gateway_probe(prefill) as second,
    ):
        await first.submit(submit(1, pb.PHASE_BOTH, PROMPT, output=4000))
        await first.until(lambda: first.tokens[1])
        await first.send(pb.GatewayFrame(aborts=pack_u32([1, 77])))
        assert (await first.event(1, "finished")).reason == pb.FINISH_REASON_ABORTED
        await second.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        await second.event(1, "prefilled")
        assert prefill.host.integrity().leased_handles == 1
        await second.send(pb.GatewayFrame(aborts=pack_u32([1])))
        await eventually(lambda: is_clean(mixed) and is_clean(prefill))


async def test_a_dead_source_fails_the_sequence_with_kv_lost() -> None:
    async with local_worker("decode-0", "decode") as b, gateway_probe(b) as decode:
        async with local_worker("prefill-0", "prefill") as a, gateway_probe(a) as prefill:
            await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
            prefilled = await prefill.event(1, "prefilled")
        lost = submit(1, pb.PHASE_DECODE, [*PROMPT, *prefill.tokens[1]], prompt_tokens=len(PROMPT))
        lost.kv.CopyFrom(prefilled.kv)
        await decode.submit(lost)
        assert (await decode.event(1, "failed")).code == pb.FAILURE_CODE_KV_LOST
        await eventually(lambda: is_clean(b))
        await decode.until(lambda: decode.decode_credits == 8)


async def test_a_handle_of_an_earlier_incarnation_or_an_unknown_one_is_kv_lost() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode") as b,
        gateway_probe(a) as prefill,
        gateway_probe(b) as decode,
    ):
        await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        kv = (await prefill.event(1, "prefilled")).kv
        for sequence, changed in enumerate(({"incarnation": 1}, {"handle": b"unknown"}), start=1):
            stale = submit(sequence, pb.PHASE_DECODE, [*PROMPT, 5], prompt_tokens=len(PROMPT))
            stale.kv.CopyFrom(kv)
            stale.kv.MergeFrom(pb.KvSource(**changed))
            await decode.submit(stale)
            assert (await decode.event(sequence, "failed")).code == pb.FAILURE_CODE_KV_LOST
        assert a.host.integrity().leased_handles == 1


async def test_an_abort_while_blocks_are_pulled_frees_the_receiver_and_keeps_the_senders_lease() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode", sim_speedup=1.0, sim_link_gbps=0.0001) as slow,
        local_worker("decode-1", "decode") as fast,
        gateway_probe(a) as prefill,
        gateway_probe(slow) as first,
        gateway_probe(fast) as second,
    ):
        await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        rest = submit(1, pb.PHASE_DECODE, [*PROMPT, 5], prompt_tokens=len(PROMPT))
        rest.kv.CopyFrom((await prefill.event(1, "prefilled")).kv)
        await first.submit(rest)
        await first.event(1, "kv_pulling")
        await first.send(pb.GatewayFrame(aborts=pack_u32([1])))
        await first.event(1, "finished")
        await eventually(lambda: is_clean(slow))
        assert a.host.integrity().leased_handles == 1
        await second.submit(rest)
        await second.event(1, "finished")
        await eventually(lambda: is_clean(a) and is_clean(fast))


async def test_blocks_for_a_vanished_gateway_are_freed_before_their_lease_ends() -> None:
    async with local_worker("prefill-0", "prefill") as worker:
        async with gateway_probe(worker) as gateway:
            await gateway.submit(*(submit(sequence, pb.PHASE_PREFILL, PROMPT) for sequence in (1, 2)))
            await gateway.event(1, "prefilled")
            await gateway.event(2, "prefilled")
            assert worker.host.integrity().leased_handles == 2
        await eventually(lambda: is_clean(worker), within_s=RETRY_MS / 1e3 + 2.0)


async def test_blocks_being_pulled_when_their_gateway_vanishes_are_pulled_to_the_end() -> None:
    async with (
        local_worker("prefill-0", "prefill") as a,
        local_worker("decode-0", "decode", sim_speedup=1.0, sim_link_gbps=0.2) as b,
        gateway_probe(b) as decode,
    ):
        async with gateway_probe(a) as prefill:
            await prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
            rest = submit(1, pb.PHASE_DECODE, [*PROMPT, 5], prompt_tokens=len(PROMPT))
            rest.kv.CopyFrom((await prefill.event(1, "prefilled")).kv)
            await decode.submit(rest)
            await decode.event(1, "kv_pulling")
        await eventually(lambda: not a.host.integrity().attached_gateways)
        assert a.host.integrity().leased_handles == 1
        finished = await decode.event(1, "finished")
        assert finished.kv_bytes_received
        await eventually(lambda: is_clean(a) and is_clean(b))
