"""Tests of trace formats: each is recognised by its columns, and errors name file and line."""

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.traces import lines as limits
from libs.lab.traces import read
from libs.lab.traces.formats import clock_tick_ms, spread_ns
from libs.lab.traces.read import KNOWN_FORMATS, read_trace
from libs.lab.traces.recording import write_trace
from libs.lab.traces.request import Trace, TraceRequest
from libs.lab.traces.scaling import cut

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
AEGAEON = """Request Time,Model Name,Input Length,Output Length
00:00:00.218,m32,248,771
00:01:00.240,m19,4,303
"""
GENAI = """t_s,model,exec_s,adapters
0,M0000,32.0,0
3,,0.0,0
4704,M0001,0.0,2
"""
SERVEGEN = """t_s,requests_per_s,known_requests_per_s,prefill_tokens_per_s,decode_tokens_per_s
0,20,20,20000,4000
600,20,2,200,200
1200,40,40,120000,16000
"""
RECORDED = """{"number":0,"arrival_ns":5,"input_tokens":7,"output_tokens":2,"service_class":"chat"}
{"number":1,"arrival_ns":5,"input_tokens":8,"output_tokens":1,"session":3,"turn":1,"think_ns":9}
"""


def mooncake(*stamps_ms: int) -> str:
    rows = [
        {"timestamp": at, "input_length": 513, "output_length": 4, "hash_ids": [0, number + 1]}
        for number, at in enumerate(stamps_ms)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "trace.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return write


def refusal(path: Path, **arguments) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path, **{"seed": 1, **arguments})
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "arrivals_ns", "tokens"),
    [
        (AZURE_2023, [0, 52_000_100], [(4808, 10), (3180, 8)]),
        (AZURE_2024, [0, 990_070_000], [(2162, 5), (2399, 6)]),
        (AEGAEON, [0, 60_022_000_000], [(248, 771), (4, 303)]),
        (GENAI, [0, 4704_000_000_000], [(1, 640), (1, 1)]),
        (mooncake(7, 9), [0, 2_000_000], [(513, 4), (513, 4)]),
        (RECORDED, [5, 5], [(7, 2), (8, 1)]),
    ],
)
def test_a_format_is_recognised_by_its_columns_whatever_the_file_name(file, text, arrivals_ns, tokens):
    found = read_trace(file(text, "some.log"), seed=1)
    assert [each.arrival_ns for each in found.requests] == arrivals_ns
    assert [(each.input_tokens, each.output_tokens) for each in found.requests] == tokens
    assert [each.number for each in found.requests] == [0, 1]
    assert found.name == "some"


def test_columns_may_have_another_order_crlf_line_ends_a_byte_order_mark_and_blank_lines(file):
    text = "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens\r\n\r\n10,2023-11-16 18:17:03,4808\r\n\r\n"
    (only,) = read_trace(file(text), seed=1).requests
    assert (only.input_tokens, only.output_tokens) == (4808, 10)


def test_a_gzip_file_reads_like_the_plain_one_whatever_its_name(tmp_path, file):
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(AZURE_2023.encode()))
    assert read_trace(packed, seed=1).requests == read_trace(file(AZURE_2023), seed=1).requests


def test_a_quoted_cell_may_contain_a_comma(file):
    text = 'Request Time,Model Name,Input Length,Output Length\n00:00:01,"a, b",5,6\n'
    assert read_trace(file(text), seed=1).requests[0].model == "a, b"


def test_models_of_a_log_are_preserved(file):
    assert [each.model for each in read_trace(file(AEGAEON), seed=1).requests] == ["m32", "m19"]
    genai = read_trace(file(GENAI), seed=1)
    assert [each.model for each in genai.requests] == ["M0000", "M0001"]
    assert any("no tokens" in note for note in genai.notes)


def test_mooncake_prompts_have_their_hash_ids_and_no_sessions(file):
    found = read_trace(file(mooncake(0, 0)), seed=1)
    assert found.block_tokens == 512
    assert [each.hash_ids for each in found.requests] == [(0, 1), (0, 2)]
    assert {each.session for each in found.requests} == {0}


def test_arrivals_of_a_coarse_clock_are_spread_over_their_tick_in_order(file):
    stamps = [tick * 3000 + off for tick, off in enumerate([0, 0, -1, 1, 0, 3]) for _ in range(20)]
    first, again, other = (read_trace(file(mooncake(*stamps)), seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    arrivals_ns = [each.arrival_ns for each in first.requests]
    assert arrivals_ns == sorted(arrivals_ns)
    assert len(set(arrivals_ns)) > 100
    assert any("every 3 s" in note for note in first.notes)
    assert [each.hash_ids[1] for each in first.requests] == list(range(1, 121))


def test_arrivals_of_a_millisecond_clock_are_unchanged():
    rng = np.random.default_rng(1)
    stamps = np.sort(rng.integers(0, 600_000, 3000)).tolist()
    assert clock_tick_ms(stamps) == 0
    assert spread_ns(stamps, 0, rng) == [stamp * 1_000_000 for stamp in stamps]
    assert clock_tick_ms(range(0, 60_000, 100)) == 0, "one request a stamp: nothing to spread"


def test_bins_give_their_rate_and_mean_lengths(file):
    found = read_trace(file(SERVEGEN), seed=1)
    first = [each for each in found.requests if each.arrival_ns < 600e9]
    last = [each for each in found.requests if each.arrival_ns >= 1200e9]
    assert len(first) == pytest.approx(12_000, abs=5 * math.sqrt(12_000))
    assert len(last) == pytest.approx(24_000, abs=5 * math.sqrt(24_000))
    assert np.mean([each.input_tokens for each in first]) == pytest.approx(1000, rel=0.1)
    assert np.mean([each.output_tokens for each in last]) == pytest.approx(400, rel=0.1)


def test_a_bin_with_few_known_lengths_has_its_own_rate_and_its_neighbours_lengths(file):
    found = read_trace(file(SERVEGEN), seed=1)
    middle = [each for each in found.requests if 600e9 <= each.arrival_ns < 1200e9]
    assert len(middle) == pytest.approx(12_000, abs=5 * math.sqrt(12_000))
    assert np.mean([each.input_tokens for each in middle]) == pytest.approx(2000, rel=0.1)
    assert any("In 1 of these bins" in note for note in found.notes)


def test_bins_can_be_drawn_at_a_fraction_of_their_rate_and_in_consistent_windows(file):
    path = file(SERVEGEN)
    assert len(read_trace(path, seed=1, rate_factor=0.1).requests) == pytest.approx(4800, abs=400)
    part = read_trace(path, seed=1, start_s=700, seconds=1000)
    assert part.requests == cut(read_trace(path, seed=1), 700, 1000).requests


@pytest.mark.parametrize("text", [AZURE_2023, AEGAEON, mooncake(0, 50), RECORDED])
def test_a_window_of_a_log_equals_a_cut_of_the_whole(file, text):
    path = file(text)
    assert read_trace(path, seed=1, seconds=0.051).requests == cut(read_trace(path, seed=1), 0, 0.051).requests


def test_a_window_numbers_its_requests_from_its_own_start(file):
    (only,) = read_trace(file(AEGAEON), seed=1, start_s=60, seconds=1).requests
    assert (only.number, only.arrival_ns) == (0, 22_000_000)
    assert "no request in the 1 s from 5 s on" in refusal(file(AEGAEON), start_s=5, seconds=1)


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (AZURE_2023 + "2023-11-16 18:17:05,0,5\n", 4, "ContextTokens is 0: it has to be 1 to"),
        (AZURE_2023 + "2023-11-16 18:17:05,3,-5\n", 4, "GeneratedTokens is -5"),
        (AZURE_2023 + "\n2023-11-16 18:17:05,3,2.5\n", 5, "GeneratedTokens is '2.5', not a whole number"),
        (AZURE_2023 + "2023-11-16 18:17:05,3\n", 4, "2 cells, where the header has 3"),
        (AZURE_2023 + "2023-11-16 18:17:03,3,3\n", 4, "sort the file by time"),
        (AZURE_2023 + "2023-13-16 18:17:03,3,3\n", 4, "TIMESTAMP is '2023-13-16 18:17:03', not a date"),
        (AZURE_2023 + f"2023-11-16 18:17:05,3,{'9' * 5000}\n", 4, "not a whole number"),
        (AZURE_2023 + '2023-11-16 18:17:05,3,"3\n', 4, "not a line of CSV"),
        (AEGAEON + "00:61:00.0,m,1,1\n", 4, "Request Time is '00:61:00.0'"),
        (AEGAEON + "00:02:00.0,,1,1\n", 4, "Model Name is empty"),
        (GENAI + "5000,M1,nan,0\n", 5, "exec_s is 'nan', not a number"),
        (GENAI + "5000,,4,0\n", 5, "model is empty"),
        (GENAI + "5000,M1,-1,0\n", 5, "exec_s is -1"),
        (mooncake(0) + "{\n", 2, "not a line of JSON"),
        (mooncake(0) + "[" * 100_000 + "\n", 2, "not a line of JSON"),
        (mooncake(0) + "[]\n", 2, "not a JSON object"),
        (mooncake(0) + '{"timestamp":1,"input_length":1}\n', 2, "its keys are input_length, timestamp"),
        (mooncake(0).replace("[0, 1]", "[0, 1, 2]"), 1, "3 hash_ids of 512 tokens, for a prompt of 513"),
        (mooncake(0).replace("[0, 1]", "[0, true]"), 1, "one of hash_ids is 'True'"),
        (mooncake(0).replace("[0, 1]", "7"), 1, "hash_ids is not a list"),
        (mooncake(5, 4), 2, "sort the file by time"),
        (SERVEGEN + "1800,5,6,600,600\n", 5, "known_requests_per_s is 6, over requests_per_s"),
        (SERVEGEN + "1800,5,5,4,600\n", 5, "less than one prefill or decode token"),
        (SERVEGEN + "1900,5,5,50,600\n", 5, "not as far from the one above"),
        (SERVEGEN + "1200,5,5,50,600\n", 5, "not after that of the line above"),
        (SERVEGEN + "1800,-5,5,50,600\n", 5, "requests_per_s is -5"),
        (RECORDED + '{"number":3,"arrival_ns":5,"input_tokens":7,"output_tokens":2}\n', 3, "this is request 2"),
        (RECORDED + '{"number":2,"arrival_ns":4,"input_tokens":7,"output_tokens":2}\n', 3, "arrival_ns is 4"),
        (RECORDED + '{"number":2,"arrival_ns":5,"input_tokens":7}\n', 3, "output_tokens is missing"),
        (RECORDED + '{"number":2,"arrival_ns":5,"input_tokens":7,"output_tokens":2,"x":1}\n', 3, "no request has 'x'"),
        (RECORDED.replace('"chat"', "7"), 1, "service_class is not a text"),
        (RECORDED.replace('"session":3', '"hash_ids":[3]'), 2, "no first line that says how many tokens"),
        ('{"trace":"t","block_tokens":-1,"notes":[]}\n', 1, "block_tokens is -1"),
        ('{"trace":"t","block_tokens":1,"notes":"n"}\n', 1, "notes is not a list"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line_number(file, text, line, what):
    path = file(text)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: ")
    assert what in message


@pytest.mark.parametrize(
    "text",
    [
        "model,gpu,input_tokens\na,b,1\n",
        "chat_id,timestamp\n",
        '{"chat_id":1,"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[],"turn":0}\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n",
        "{\n",
        "",
    ],
)
def test_a_foreign_format_is_refused_with_all_known_ones_and_the_command_that_lists_their_columns(file, text):
    message = refusal(file(text))
    for name in KNOWN_FORMATS:
        assert name.split(",")[0].split(" (")[0] in message or name.startswith("any other CSV")
    assert "with columns listed by `fulcrum lab traces`" in message


@pytest.mark.parametrize("text", [AZURE_2023, AEGAEON, GENAI, SERVEGEN])
def test_a_file_with_only_a_header_is_refused(file, text):
    assert "no request in it" in (said := refusal(file(text.partition("\n")[0]))) or "no bin" in said


def test_an_unreadable_file_is_refused_in_one_line(tmp_path, file):
    assert "cannot be read: No such file" in refusal(tmp_path / "absent.csv")
    assert "cannot be read" in refusal(tmp_path)
    cut_short = tmp_path / "short.gz"
    cut_short.write_bytes(gzip.compress(AZURE_2023.encode())[:-9])
    assert "cannot be read" in refusal(cut_short)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(AZURE_2023.encode() + b"\xff\xfe\n")
    assert refusal(binary).startswith(f"{binary}:4: not UTF-8")
    assert "start_s has to be 0 or more" in refusal(file(AZURE_2023), start_s=-1)


def test_an_endless_line_and_too_many_requests_are_refused(monkeypatch, file):
    monkeypatch.setattr(read, "MAX_REQUESTS", 1)
    assert "more than 1 requests: read a part of it, by --start and --seconds" in refusal(file(AZURE_2023))
    assert "a trace has at most" in refusal(file(SERVEGEN), rate_factor=1e6)
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 10)
    assert "over 10 bytes" in refusal(file(AZURE_2023))


def test_a_trace_written_twice_gives_equal_files_and_reads_back_unchanged(tmp_path):
    requests = (
        TraceRequest(0, 0, 600, 5, (4, 1 << 100), 9, "m", "t", "chat", 1, 0, 0),
        TraceRequest(1, 7, 10, 1),
    )
    trace = Trace("näme\n", requests, 512, ("One.", "Two."))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz"):
        write_trace(trace, tmp_path / name)
        assert read_trace(tmp_path / name, seed=1) == trace
    assert (tmp_path / "b.jsonl.gz").read_bytes() == (tmp_path / "c.jsonl.gz").read_bytes()
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_trace(trace, tmp_path / "no" / "folder")


SHARED = os.environ.get("FULCRUM_DATA", "")


@pytest.mark.parametrize(
    ("name", "count", "duration_s"),
    [
        ("azure_code_2023.csv", 8819, 3435.9),
        ("mooncake_conversation.jsonl", 12_031, 3539.7),
        ("aegaeon_synth_80models_0.5rps.csv", 2214, 59.8),
        ("alibaba_genai_2024-11.csv", 14_266, 1_320_314),
    ],
)
def test_a_public_log_is_read_completely(name, count, duration_s):
    path = Path(SHARED) / name
    if not SHARED or not path.is_file():
        pytest.skip(f"FULCRUM_DATA names no folder with {name}; docs/data.md says where to download it")
    found = read_trace(path, seed=1)
    assert len(found.requests) == count
    assert found.duration_ns / 1e9 == pytest.approx(duration_s, abs=3)


@pytest.mark.parametrize("name", ["servegen_m-large_10min.csv", "servegen_deepseek-r1_10min.csv"])
def test_a_public_file_of_bins_is_drawn_completely(name):
    path = Path(SHARED) / name
    if not SHARED or not path.is_file():
        pytest.skip(f"FULCRUM_DATA names no folder with {name}; docs/data.md says where to download it")
    assert len(read_trace(path, seed=1, rate_factor=1e-4).requests) > 100
