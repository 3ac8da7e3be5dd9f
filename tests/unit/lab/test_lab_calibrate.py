"""Tests of `fulcrum lab calibrate`: step times of workers become a profile, which the lab reads back unchanged."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cli.lab.calibrate import WorkerDescription, learned_of, read_reported
from libs.cli.lab.runs import RunOptions
from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Capabilities, Worker
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.topics import STEPS
from libs.lab.hardware import Hardware, LearnedWorker, by_name, calibrated, profile_named, read_profile, write_profile
from libs.perfmodel.learner import FittedModel, KindFit
from libs.perfmodel.profiles import PROFILES, Profile
from libs.perfmodel.wire import step_time_message
from libs.policy.step_time import StepTimeModel
from libs.testing.memory.broker import MemoryBroker
from libs.testing.memory.bus import MemoryBus

MODEL = PROFILES["llama-8b-h100"].step_time
BEGAN_NS = 1_700_000_000_000_000_000


def learned(worker_id: str, model: StepTimeModel = MODEL, **given: object) -> LearnedWorker:
    fields = {
        "engine": "sim",
        "model": "m",
        "device": "sim:h100",
        "gpus": 1,
        "fitted": FittedModel(model),
        "chunk_tokens": 512,
        "kv_blocks": 1000,
        "kv_block_bytes": 16 * 131_072,
        "block_tokens": 16,
        "max_sequences": 64,
        **given,
    }
    return LearnedWorker(worker_id, **fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------- from workers to hardware


def test_each_kind_of_step_is_taken_from_the_worker_that_measured_most_of_them() -> None:
    slow, fast = MODEL.scaled(3), MODEL.scaled(0.5)
    prefill = learned("p", fitted=FittedModel(slow, prefill=KindFit(500), decode=KindFit(2)), chunk_tokens=1024)
    decode = learned("d", fitted=FittedModel(fast, prefill=KindFit(3), decode=KindFit(9000)))
    hardware, notes = calibrated("mine", [decode, prefill])
    found = hardware.profile.step_time
    assert found.prefill_token_ns == slow.prefill_token_ns
    assert found.decode_kv_token_ns == fast.decode_kv_token_ns
    assert hardware.chunk_tokens == 1024, "that of the worker whose prefill it is"
    assert not hardware.mixed_measured
    assert any("mixed" in note for note in notes)


def test_kv_link_and_hop_are_medians_of_measurements_and_empty_without_any() -> None:
    seen = [learned(str(n), kv_token_ns=ns, round_trip_ms=ms) for n, (ns, ms) in enumerate([(50, 1), (80, 3), (0, 2)])]
    hardware, notes = calibrated("mine", seen)
    assert hardware.hop_ms == 1.0
    assert hardware.link_gbps == pytest.approx(131_072 * 8 / 65)
    hardware, notes = calibrated("mine", [learned("a")])
    assert hardware.hop_ms is None and hardware.link_gbps is None
    assert any("link" in note for note in notes)


def test_workers_of_two_kinds_give_no_profile() -> None:
    with pytest.raises(InvalidRequest, match="--worker"):
        calibrated("mine", [learned("a"), learned("b", device="cpu")])
    with pytest.raises(InvalidRequest, match="no worker"):
        calibrated("mine", [])


def test_the_smallest_worker_bounds_kv_and_sequences() -> None:
    hardware, _ = calibrated("mine", [learned("a", kv_blocks=900), learned("b", max_sequences=32)])
    assert hardware.profile.kv_memory_bytes == 900 * 16 * 131_072
    assert hardware.profile.kv_bytes_per_token == 131_072
    assert hardware.max_sequences == 32


# ---------------------------------------------------------------- from telemetry


def batch(worker_id: str, to_ns: int, incarnation: int = 1, **given: object) -> StepBatch:
    described = {"step_time": step_time_message(FittedModel(MODEL)), **given}
    return StepBatch(worker_id=worker_id, incarnation=incarnation, covered_to_unix_ns=to_ns, **described)  # type: ignore[arg-type]


async def reported_by(batches: list[StepBatch], wait_s: float = 5.0):  # type: ignore[no-untyped-def]
    broker = MemoryBroker()
    bus = MemoryBus(broker, "local")
    await bus.start()
    for each in batches:
        bus.publish(STEPS, each)
    await bus.close()
    reader = MemoryBus(broker, "local")
    return await read_reported(reader, {"a": 1, "b": 2}, {"a": 16, "b": 16}, BEGAN_NS, wait_s)


async def test_telemetry_is_read_until_every_worker_has_sent_its_latest() -> None:
    slower = step_time_message(FittedModel(MODEL.scaled(2), decode=KindFit(10)))
    transfer = KvTransfer(blocks=10, start_unix_ns=BEGAN_NS - 8000, end_unix_ns=BEGAN_NS)
    found = await reported_by(
        [
            batch("a", BEGAN_NS - 10, kv_transfers=[transfer]),
            batch("a", BEGAN_NS + 1, step_time=slower),
            batch("b", BEGAN_NS + 1, incarnation=1, step_time=slower),  # it was another one then
            batch("b", BEGAN_NS + 2, incarnation=2),
            batch("c", BEGAN_NS + 2),
        ]
    )
    assert set(found) == {"a", "b"}
    assert found["a"].fitted == FittedModel(MODEL.scaled(2), decode=KindFit(10))
    assert found["a"].transfers.token_ns == 8000 / 160
    assert found["b"].fitted == FittedModel(MODEL)


async def test_a_silent_worker_is_omitted() -> None:
    found = await reported_by([batch("a", BEGAN_NS + 1)], wait_s=0.05)
    assert set(found) == {"a"}


async def test_a_worker_is_described_by_its_own_answer_and_its_telemetry() -> None:
    reported = await reported_by([batch("a", BEGAN_NS + 1), batch("b", BEGAN_NS + 1, incarnation=2)])
    can = Capabilities(block_size_tokens=16, kv_blocks=7, kv_block_bytes=160, max_sequences=5)
    worker = Worker(id="a", engine="sim", device="cpu", assignment=Assignment(model="m"), capabilities=can)
    found = learned_of(WorkerDescription(worker, 300, [1.0, 9.0, 2.0]), reported["a"])
    assert found.kind == ("sim", "m", "cpu", 1)
    assert (found.chunk_tokens, found.round_trip_ms, found.kv_blocks) == (300, 2.0, 7)


# ---------------------------------------------------------------- files

amounts = st.floats(0, 1e13)
profiles = st.builds(
    Profile,
    name=st.text(min_size=1),
    step_time=st.builds(StepTimeModel, *[amounts] * 6, st.floats(0, 1), amounts, amounts),
    kv_bytes_per_token=st.integers(1, 1 << 30),
    kv_memory_bytes=st.integers(1, 1 << 45),
    gpus=st.integers(1, 64),
)
hardwares = st.builds(
    Hardware,
    profiles,
    st.booleans(),
    st.integers(0, 8192),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0.001, 10_000),
    st.none() | st.integers(1, 4096),
)


@given(hardwares)
def test_a_written_profile_is_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, made: Hardware) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.json"
    write_profile(made, path, source="here")
    assert read_profile(path) == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step_time": None}, "no step_time"),
        ({"name": ""}, "name is no text"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 1.5}, "no whole number"),
        ({"gpus": "many"}, "gpus is no number"),
        ({"hop_ms": -1}, "hop_ms is -1"),
        ({"hop_ms": float("nan")}, "hop_ms is no number"),
        ({"kv_bytes_per_token": None}, "kv_bytes_per_token"),
        ({"link_gbps": 0}, "link_gbps is 0"),
        ({"chunk_tokens": True}, "chunk_tokens is no number"),
    ],
)
def test_a_broken_profile_is_refused_by_the_name_of_its_wrong_key(
    change: dict[str, object], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    write_profile(calibrated("mine", [learned("a")])[0], path, source="here")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidRequest, match=says):
        read_profile(path)


ADDED_LATER = (
    "prefill_floor_ns", "decode_matrix_ns", "saturating_sequences", "decode_wide_ns", "graph_sequences",
    "graph_exit_ns",
)  # fmt: skip


def test_large_batches_survive_a_profile_file(tmp_path: Path) -> None:
    write_profile(by_name("llama3.1-8b-h200-aic-eager"), tmp_path / "p.json", source="here")
    assert read_profile(tmp_path / "p.json") == by_name("llama3.1-8b-h200-aic-eager")


def test_every_step_time_is_required_except_those_added_later(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(by_name("llama-8b-h100"), path, source="here")
    whole = json.loads(path.read_text())
    for each in fields(StepTimeModel):
        rest = {name: value for name, value in whole["step_time"].items() if name != each.name}
        path.write_text(json.dumps({**whole, "step_time": rest}))
        if each.name in ADDED_LATER:
            read_profile(path)
        else:
            with pytest.raises(InvalidRequest, match=f"{each.name} is missing"):
                read_profile(path)


def test_a_profile_that_is_not_json_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{", "[" * 60_000, "9" * 60_000):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(InvalidRequest, match=r"p\.json is no"):
            read_profile(tmp_path / "p.json")


def test_a_name_without_a_file_is_a_shipped_profile(tmp_path: Path) -> None:
    assert profile_named("llama-8b-h100") == by_name("llama-8b-h100")
    with pytest.raises(InvalidRequest, match="calibrate"):
        profile_named(str(tmp_path / "none.json"))
    with pytest.raises(InvalidRequest, match="not known"):
        profile_named("none")


def test_an_experiment_uses_measured_figures_and_the_labs_own_for_the_rest(tmp_path: Path) -> None:
    measured = replace(by_name("llama-8b-h100"), chunk_tokens=300, hop_ms=0.5, link_gbps=12.5, max_sequences=7)
    path = tmp_path / "p.json"
    write_profile(measured, path, source="here")

    def requested(profile: str) -> RunOptions:
        spec = "poisson:rate=2,seconds=5"
        slo = "ttft=max(2s,3x),tpot=50ms"
        return RunOptions(spec, 2, "h100", "llama-3.1-8b", 0, slo, 1, "superpose", 0, 0, 1, -1, profile)

    found = requested(str(path)).experiment()
    assert (found.speed.chunk_tokens, found.hop_ms, found.link_gbps, found.max_sequences) == (300, 0.5, 12.5, 7)
    shipped = requested("llama-8b-h100").experiment()
    assert (shipped.hop_ms, shipped.link_gbps, shipped.max_sequences) == (1.0, 400.0, 256)
    assert shipped.speed.chunk_tokens > 300
