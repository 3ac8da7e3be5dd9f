"""Tests without vLLM of parts of the vllm engine: steps, block hashes, messages and the leash."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.contracts.hashing import block_hashes
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import FinishReason
from libs.engine.vllm import plugin
from libs.engine.vllm.engine import HandoverRefusal, lease_margin_ns, refusal
from libs.engine.vllm.sequences import Sequences
from libs.engine.vllm.step_reports import (
    Command,
    EngineReport,
    PendingBlocks,
    PendingNews,
    Rehash,
    Step,
    decode_command,
    decode_report,
    encode,
    scheduled_work,
)
from libs.policy.step_time import StepWork

BLOCK = 4
ROOT = b"root of a tenant"
TOKENS = list(range(12))


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
        capabilities = Capabilities(BLOCK, 8, 1, 64, 1, "vllm/test")
        margin_ns = lease_margin_ns(lease_ms)
        return refusal(request, handover, capabilities, engine_id="one", margin_ns=margin_ns, now_ns=now_ns)

    assert refused(latest_ns) is None
    late = refused(latest_ns + 1)
    assert late is not None and late.finish is FinishReason.KV_LOST


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
