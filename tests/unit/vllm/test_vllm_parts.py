"""Tests without vLLM of parts of the vllm engine: steps, block hashes, messages and the leash."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.hashing import ImageSpan, block_hashes, image_hash
from libs.engine.kv_blocks import KvWait
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import FinishReason
from libs.engine.vllm import handover as handovers
from libs.engine.vllm import plugin
from libs.engine.vllm.handover import HandoverRefusal, PullLeases, lease_margin_ns, refusal
from libs.engine.vllm.sequences import ImageTotals, OutputReader, Sequences
from libs.engine.vllm.step_reports import (
    NOBODY,
    Board,
    Command,
    EngineReport,
    PendingBlocks,
    PendingNews,
    Rehash,
    SpanRing,
    Step,
    Steps,
    decode_command,
    decode_report,
    encode,
    scheduled_work,
)
from libs.perfmodel.utilisation import KvGroup, KvShape
from libs.policy.step_time import StepWork

BLOCK = 4
ROOT = b"root of a tenant"
TOKENS = list(range(12))
NO_SESSION: Any = None
"""No KV connector, where nothing is handed over."""


def test_prompt_chunks_and_decodes_are_distinguished() -> None:
    work = scheduled_work([(0, 64, 75), (64, 75, 75), (75, 76, 76), (99, 100, 100)])
    assert (work.prefill_tokens, work.prefill_sequences) == (75, 2)
    assert work.prefill_squared_tokens == 75**2
    assert (work.decode_sequences, work.decode_kv_tokens) == (2, 176)


def test_the_last_prompt_token_of_a_transferred_sequence_counts_as_a_decode() -> None:
    assert scheduled_work([(74, 75, 75)]) == StepWork(decode_sequences=1, decode_kv_tokens=75)


def test_a_prompt_of_one_token_counts_as_a_prompt() -> None:
    assert scheduled_work([(0, 1, 1)]).prefill_tokens == 1


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500))))
def test_every_token_is_counted_once(parts: list[tuple[int, int]]) -> None:
    work = scheduled_work([(start, start + tokens, start + tokens) for start, tokens in parts])
    assert work.prefill_tokens + work.decode_sequences == sum(tokens for _, tokens in parts)


def test_chains_of_blocks_are_converted_wherever_they_were_cut() -> None:
    rehash = Rehash(BLOCK)
    rehash.stored(["a"], None, ROOT.hex(), TOKENS[:4])
    rehash.stored(["b", "c"], "a", "", TOKENS[4:])
    assert rehash.take() == (block_hashes(ROOT, TOKENS, BLOCK), [])
    rehash.removed(["b", "unknown"])
    assert rehash.take() == ([], block_hashes(ROOT, TOKENS, BLOCK)[1:2])


@st.composite
def image_prompts(draw: st.DrawFn) -> tuple[list[int], list[ImageSpan]]:
    """A prompt's tokens, with the places of its images."""
    found, at = [], 0
    for text, tokens in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 11)), max_size=4)):
        found.append(ImageSpan(at + text, tokens, image_hash(draw(st.binary(max_size=1)))))
        at += text + tokens
    return list(range(at + draw(st.integers(0, 9)))), found


def block_images(images: list[ImageSpan], start: int) -> list[tuple[str, int]]:
    """Return the images of one block as vLLM's event of a stored block has them."""
    inside = [each for each in images if each.first < start + BLOCK and start < each.first + each.tokens]
    return [(each.digest.hex(), each.first - start) for each in inside]


@given(image_prompts(), st.integers(0, 8))
def test_hashes_of_blocks_with_images_become_ours_wherever_they_were_cut(
    prompt: tuple[list[int], list[ImageSpan]], cut: int
) -> None:
    tokens, images = prompt
    starts = list(range(0, len(tokens) // BLOCK * BLOCK, BLOCK))
    cut = min(cut, len(starts))
    rehash = Rehash(BLOCK)
    for part, parent in ((starts[:cut], None), (starts[cut:], starts[cut - 1] if cut else None)):
        if part:
            own, salt = tokens[part[0] : part[-1] + BLOCK], "" if parent is not None else ROOT.hex()
            rehash.stored(part, parent, salt, own, [block_images(images, start) for start in part])
    assert rehash.take() == (block_hashes(ROOT, tokens, BLOCK, images), [])


def test_equal_tokens_with_another_image_have_other_hashes() -> None:
    found = []
    for image in (b"one", b"other"):
        rehash = Rehash(BLOCK)
        rehash.stored(["a", "b"], None, ROOT.hex(), TOKENS[:8], [[], [(image_hash(image).hex(), 1)]])
        found.append(rehash.take()[0])
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_a_step_that_encodes_is_reported_as_two_in_a_row_and_not_announced(tmp_path: Path) -> None:
    ring = SpanRing(tmp_path / "encodes")
    model = SimpleNamespace(embed_multimodal=lambda **inputs: inputs["pixels"])
    plugin.time_encodes(model, ring, lambda: None)
    board = Board(tmp_path / "board")
    steps = Steps(board, KvWait(), SpanRing(tmp_path / "encodes"))
    start_ns = time.time_ns()
    steps.decided(StepWork(prefill_tokens=40, prefill_sequences=1), start_ns, 2)
    steps.decided(StepWork(decode_sequences=1, decode_kv_tokens=40), start_ns)
    assert board.read() in {None, NOBODY}
    assert model.embed_multimodal(pixels=7) == 7
    step = steps.end(time.time_ns())
    running = board.read()
    assert running is not None and running.work == StepWork(decode_sequences=1, decode_kv_tokens=40)
    assert step.encoded_images == 2 and 0 < step.encode_ns <= step.end_ns - step.start_ns
    report = EngineReport(step.end_ns, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, step=step)
    images = ImageTotals()
    reader = OutputReader(
        Sequences(), Capabilities(BLOCK, 8, 1, 64, 1, "vllm/test"), EngineIdentity("w", 1, ""), NO_SESSION, lease_ns=1,
        release=lambda _name: None, images=images,
    )  # fmt: skip
    encoding, rest = reader.encoding(report).step, reader.event(SimpleNamespace(outputs=[]), report).step
    assert encoding is not None and rest is not None
    assert (encoding.encoded_images, encoding.prefill_tokens) == (2, 0)
    assert (rest.encoded_images, rest.prefill_tokens) == (0, 40)
    assert encoding.start_unix_ns == start_ns and encoding.end_unix_ns == rest.start_unix_ns
    assert rest.end_unix_ns == step.end_ns
    assert (images.encoded, images.encode_ns) == (2, step.encode_ns)
    without = reader.encoding(EngineReport(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, step=Step(1, 2, 3, 4, 5, 6, 7, 8)))
    assert without.step is None


def test_blocks_without_a_root_are_not_converted() -> None:
    rehash = Rehash(BLOCK)
    rehash.stored(["a"], None, "private 7-request", TOKENS[:4])
    rehash.stored(["b"], "a", "", TOKENS[4:8])
    rehash.stored(["c"], "never seen", "", TOKENS[4:8])
    rehash.cleared()
    assert rehash.take() == ([], [])


def test_a_block_that_comes_and_goes_between_two_reports_is_not_reported() -> None:
    rehash = Rehash(BLOCK)
    rehash.stored(["a"], None, ROOT.hex(), TOKENS[:4])
    rehash.removed(["a"])
    assert rehash.take() == ([], [])


def test_a_hash_is_held_until_the_last_of_its_blocks_is_gone() -> None:
    rehash = Rehash(BLOCK)
    rehash.stored(["a"], None, ROOT.hex(), TOKENS[:4])
    rehash.stored(["a"], None, ROOT.hex(), TOKENS[:4])
    assert rehash.take() == (block_hashes(ROOT, TOKENS[:4], BLOCK), [])
    rehash.removed(["a"])
    assert rehash.take() == ([], [])
    rehash.stored(["b"], "a", "", TOKENS[4:8])
    rehash.removed(["a"])
    assert rehash.take() == (block_hashes(ROOT, TOKENS, BLOCK)[1:2], block_hashes(ROOT, TOKENS[:4], BLOCK))


def test_messages_round_trip() -> None:
    report = EngineReport(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, step=Step(1, 2, 3, 4, 5, 6, 7, 8), stored=[b"hash"])
    assert decode_report(encode(report)) == report
    command = Command(prefill_budget=0, release=["one"])
    assert decode_command(encode(command)) == command


def test_a_lease_outlives_its_sequence_and_is_found_by_its_key() -> None:
    sequences = Sequences()
    request = EngineRequest(7, "r", EnginePhase.PREFILL, np.arange(5, dtype=np.int32), 5, 1, SamplingParams())
    live = sequences.add(request, sequences.new_name(request))
    sequences.lease(live)
    sequences.remove(live)
    again = sequences.add(request, sequences.new_name(request))
    assert again.name != live.name and sequences.leased_by(7) == [live.name]
    sequences.lease_over(live.name)
    assert not sequences.leases and sequences.by_name(again.name) is again


@pytest.mark.parametrize(("lease_ms", "margin_s"), [(30_000, 8.0), (60_000, 13.0), (6_000, 3.0), (1, 0.5)])
def test_a_handle_is_refused_if_its_lease_ends_before_the_next_heartbeat(lease_ms: int, margin_s: float) -> None:
    assert lease_margin_ns(lease_ms) == int(margin_s * 1e9)
    handle = KvHandle("prefill", 1, "", b"", len(TOKENS), 3, "vllm/test")
    request = EngineRequest(
        1, "r", EnginePhase.DECODE, np.array(TOKENS, dtype=np.int32), len(TOKENS), 1, SamplingParams(), kv=handle
    )
    handover = SimpleNamespace(engine_id="other", expires_unix_ns=100_000_000_000)
    latest_ns = handover.expires_unix_ns - lease_margin_ns(lease_ms)

    def refused(now_ns: int) -> HandoverRefusal | None:
        margin_ns = lease_margin_ns(lease_ms)
        return refusal(
            request, handover, CAPABILITIES, engine_id="one", pulls=False, margin_ns=margin_ns, now_ns=now_ns
        )

    assert refused(latest_ns) is None
    late = refused(latest_ns + 1)
    assert late is not None and late.finish is FinishReason.KV_LOST


CAPABILITIES = Capabilities(BLOCK, 8, 1, 64, 1, "vllm/test")
PULL = {
    "remote_engine_id": "other",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4, 5]],
    "remote_num_tokens": len(TOKENS),
}


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ({}, ""),
        ({"remote_block_ids": [[9], [3, 4, 5]]}, ""),  # a group of layers that attend to a window
        ({"remote_block_ids": [[3, 4]], "dcp_size": 2}, ""),
        ({"remote_block_ids": [[3, 4]]}, "blocks: 2 of 4 tokens for 12 tokens of the prompt"),
        ({"remote_block_ids": []}, "remote_block_ids"),
        ({"remote_block_ids": [3, 4, 5]}, "remote_block_ids of each group of layers"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_num_tokens": 11}, "KV of 12 tokens: 11 were computed"),
    ],
)
def test_a_handle_must_name_all_that_its_receiver_needs(wrong: dict[str, Any], missing: str) -> None:
    assert handovers.missing(PULL | wrong, len(TOKENS), CAPABILITIES) == missing


def test_a_model_with_windows_only_needs_the_blocks_of_its_window() -> None:
    windows = replace(CAPABILITIES, kv_shape=KvShape((KvGroup(BLOCK, 1, window_tokens=2 * BLOCK),)))
    assert handovers.missing(PULL | {"remote_block_ids": [[4, 5]]}, len(TOKENS), windows) == ""
    lacking = "blocks: 1 of 4 tokens for 8 tokens of the prompt"
    assert handovers.missing(PULL | {"remote_block_ids": [[5]]}, len(TOKENS), windows) == lacking
    both = KvShape((KvGroup(BLOCK, 1, window_tokens=BLOCK), KvGroup(BLOCK, 1)))
    assert handovers.missing(PULL | {"remote_block_ids": [[5], [4, 5]]}, len(TOKENS), replace(windows, kv_shape=both))


@given(st.integers(1, 60), st.lists(st.floats(0.01, 40), min_size=1, max_size=40), st.floats(0.5, 60))
def test_a_pull_is_trusted_only_while_its_source_still_holds_the_blocks(
    lease_s: int, pauses_s: list[float], left_s: float
) -> None:
    receiver, now_ns = PullLeases(lease_s), 0
    receiver.begin("r", int(left_s * 1e9), now_ns)
    # The source: each heartbeat, sent in the first turn after it is due, makes the lease last from then on.
    held_until_ns, heartbeat_ns = int(left_s * 1e9), 0
    for pause_s in pauses_s:
        now_ns += int(pause_s * 1e9)
        held = now_ns <= held_until_ns
        receiver.turn(now_ns)
        if held and now_ns - heartbeat_ns >= lease_s // 6 * 1_000_000_000:
            heartbeat_ns = now_ns
            held_until_ns = max(held_until_ns, now_ns + lease_s * 2 // 3 * 1_000_000_000)
        if not held:
            assert not receiver.ended("r", now_ns)
            return
    if receiver.ended("r", now_ns):
        assert now_ns <= held_until_ns
    assert receiver.ended("of another connector", now_ns)


def test_heartbeats_keep_a_waiting_pull_trusted() -> None:
    receiver = PullLeases(30)
    receiver.begin("r", 30_000_000_000, 0)
    for second in range(600):
        receiver.turn(second * 1_000_000_000)
    assert receiver.ended("r", 600_000_000_000)


def test_a_hold_ends_once_whoever_ends_it() -> None:
    held, news = PendingBlocks(), PendingNews()
    for name in ("pulled", "released", "expired"):
        held.prefilled(name, news, kept=True)
    held.prefilled("not kept", news, kept=False)
    assert news.released == ["not kept"] and "pulled" in held and "not kept" not in held
    held.let_go("released")
    held.freed("released", news)
    for name in sorted(held.still_there({"pulled", "released", "expired"})):
        held.freed(name, news)
    held.freed("of its own engine", news)
    assert news.released == ["not kept", "released", "expired", "pulled"]
    assert held.still_there({"released"}) == {"released"}, "a released name is forgotten once it is reported"


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_a_process_on_the_leash_dies_with_its_parent() -> None:
    child = (
        "from libs.engine.vllm import plugin; plugin.register(); print('on', flush=True); import time; time.sleep(60)"
    )
    parent = (
        f"import os, subprocess, sys, time; os.environ[{plugin.LEASH_VARIABLE!r}] = str(os.getpid());"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE);"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 1.0
    while _lives(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rpartition(")")[2].split()[0] != "Z"
