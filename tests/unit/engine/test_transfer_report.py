"""Tests of the time that a receiver reports for a KV transfer."""

import numpy as np

from libs.engine.kv_blocks import ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase, EngineRequest, SamplingParams
from libs.engine.sequence import Sequence


def receiver(*, streamed: bool) -> Sequence:
    handle = KvHandle("source", 1, "", b"", tokens=1_200, blocks=75, streamed=streamed)
    tokens = np.zeros(1_200, np.int32)
    request = EngineRequest(1, "r", EnginePhase.DECODE, tokens, 1_200, 8, SamplingParams(), kv=handle)
    return Sequence(request, block_size_tokens=16, max_context_tokens=4_096)


def test_the_time_of_prompt_computation_is_not_charged_to_the_link() -> None:
    sequence = receiver(streamed=True)
    for ready, now_ns in ((False, 1_000), (True, 1_500), (False, 1_530), (True, 2_000)):
        sequence.kv_ready = ready
        sequence.note_kv_ready(now_ns)
    assert sequence.transfer_report(ReceivedTotals(75, 9_600), 1_000, 2_040).ready_ns == 30 + 40


def test_kv_that_was_ready_before_the_pull_is_in_transfer_for_the_whole_time() -> None:
    sequence = receiver(streamed=False)
    sequence.note_kv_ready(500)
    assert sequence.transfer_report(ReceivedTotals(75, 9_600), 1_000, 2_040).ready_ns == 1_040
