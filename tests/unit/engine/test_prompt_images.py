"""Tests of a prompt's images between gateway and engine: who receives the files, and how their time counts."""

from random import Random

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.contracts.hashing import ImageSpan, block_hashes, image_hash
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.step_row import StepRow, step_columns
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.suspects import _fingerprint
from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, PromptImage, SamplingParams
from libs.engine.reports import FinishReason, SequenceOutput
from libs.engine.runner import Sampled
from libs.policy.gateway.placement import Attempt
from libs.policy.roles import Phase
from libs.telemetry.columns import prefill_shares
from libs.telemetry.steps import FULL_SHARE
from libs.worker.wire import engine_request

GREEDY = SamplingParams(temperature=0.0)
FILE = b"a picture"
SPAN = ImageSpan(2, 3, image_hash(FILE))
PROMPT = [1, 2, 9, 9, 9, 3]


def generation(data: bytes = FILE) -> Generation:
    return Generation(
        request_id="r", model="m", prompt=np.array(PROMPT, "<u4").tobytes(), prompt_tokens=len(PROMPT),
        max_output_tokens=3, sampling=pb.Sampling(), context=pb.RequestContext(), end_token_ids=frozenset(),
        sink=None, timeline=RequestTimes(0), images=(PromptImage(SPAN._replace(digest=image_hash(data)), data),),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("phase", list(Phase))
def test_only_workers_that_compute_the_prompt_receive_the_file_even_after_a_loss(phase: Phase) -> None:
    found = generation()
    for sequence_id, output in ((1, []), (2, [7])):
        found.output = output
        message = found.message(Attempt(("w", 1), sequence_id, phase, len(output)), None, 1)
        if phase is Phase.DECODE:
            message.kv.address, message.kv.handle, message.kv.tokens = "a", b"h", len(PROMPT)
        request = engine_request(message, sequence_id, b"root")
        assert request.images == (PromptImage(SPAN, b"" if phase is Phase.DECODE else FILE),)


def test_equal_prompts_about_other_images_count_as_other_prompts_in_the_poison_check() -> None:
    assert _fingerprint(generation()) == _fingerprint(generation())
    assert _fingerprint(generation()) != _fingerprint(generation(b"another"))


def test_block_hashes_differ_from_the_first_different_image_on() -> None:
    tokens, other = list(range(24)), ImageSpan(5, 6, image_hash(b"other"))
    plain, one, two = (
        block_hashes(b"root", tokens, 4, images) for images in ([], [ImageSpan(5, 6, image_hash(FILE))], [other])
    )
    assert plain[0] == one[0] == two[0]
    assert all(len({*each}) == 3 for each in zip(plain[1:], one[1:], two[1:], strict=True))
    assert one != block_hashes(b"root", tokens, 4, [ImageSpan(6, 6, image_hash(FILE))])
    # Hashed in parts, as a sequence grows.
    assert two == two[:2] + block_hashes(two[1], tokens[8:], 4, [other], first=8)


def core(kv_blocks: int, *, images: bool = True) -> Core:
    capabilities = Capabilities(4, kv_blocks, 1, 64, 8, "test", images=images)
    random_bytes = Random(1).randbytes
    return Core(
        EngineConfig(None, "m"), capabilities, frozenset(), EngineIdentity("w", 1, ""), random_bytes=random_bytes
    )


def transferred(sequence_id: int, *, tokens: int = len(PROMPT)) -> EngineRequest:
    handle = KvHandle("p", 1, "a", b"h", tokens=tokens, blocks=-(-tokens // 4), kv_layout="test")
    ids = np.array([*PROMPT, 5], np.int32)
    images = (PromptImage(SPAN),)
    return EngineRequest(
        sequence_id, "r", EnginePhase.DECODE, ids, len(PROMPT), 30, GREEDY, kv=handle, images=images
    )  # fmt: skip


def test_a_decode_that_loses_its_blocks_requests_its_image_again() -> None:
    one = core(kv_blocks=9)
    one.submit(EngineRequest(1, "r", EnginePhase.BOTH, np.ones(6, np.int32), 6, 30, GREEDY), 1)
    outputs: list[SequenceOutput] = []
    for now_ns in range(2, 60):
        batch = one.plan(now_ns)
        assert batch is not None
        one.begin(batch, now_ns)
        one.apply(batch, {chunk.sequence_id: Sampled(7) for chunk in batch.chunks if chunk.sample}, now_ns)
        if now_ns == 2:
            one.submit(transferred(2), now_ns)
            for sequence in one.take_fetches():
                one.kv_arrived(sequence, ReceivedTotals(), now_ns, now_ns)
        event = one.take_event()
        outputs += event.outputs if event else ()
        if one.load().running < 1:
            break
        if any(output.finish for output in outputs):
            break
    ends = {output.sequence_id: output for output in outputs if output.finish}
    assert ends[2].finish is FinishReason.KV_LOST
    assert "images are not here" in ends[2].detail
    assert 1 not in ends
    assert not one.pool_fault()


def test_engines_without_vision_and_handles_that_end_within_an_image_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="engine torch"):
        core(kv_blocks=30, images=False).submit(transferred(1), 1)
    with pytest.raises(InvalidRequest, match="without its file"):
        core(kv_blocks=30).submit(transferred(1, tokens=4), 1)


def test_a_step_that_encodes_counts_as_prefill() -> None:
    rows = [
        StepRow(1, 2, encoded_images=2, prefill_sequences=2),
        StepRow(3, 4, prefill_tokens=5, prefill_sequences=1),
        StepRow(5, 6, decode_sequences=1, decode_kv_tokens=9),
    ]
    assert prefill_shares(StepBatch(steps=step_columns(rows))) == [FULL_SHARE, FULL_SHARE, 0]
    assert prefill_shares(StepBatch(steps=step_columns(rows[:1]))) == [FULL_SHARE]
    assert prefill_shares(StepBatch(steps=step_columns(rows[:2]))) == [FULL_SHARE, FULL_SHARE]
