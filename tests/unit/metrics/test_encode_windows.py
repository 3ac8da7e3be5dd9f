"""Tests of the time of encoding images in windows, which are kept, stored, exchanged, streamed and summed."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.step_row import StepRow
from libs.telemetry.rollups import TIERS, RollUps
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.accounting.series import history, parse_scope, sums
from services.metrics.history import HistoryFile, HistorySnapshot
from services.metrics.http.routes import pack
from services.metrics.shared_records import cells_of_columns
from services.metrics.stream import TICK_NS, TickWriter
from tests.unit.metrics.sharing_rig import Instance


def encoding(start_ms: int, end_ms: int) -> StepRow:
    return step(start_ms, end_ms)._replace(prefill_sequences=1, encoded_images=1)


def batches() -> list[StepBatch]:
    """Return three batches of 100 ms with an encode of 200 ms across them, and 30 ms of a prompt at their end."""
    whole = encoding(50, 250)
    by_batch: tuple[list[StepRow], ...] = ([whole._replace(end_unix_ns=0)], [], [whole, step(260, 290, prefill=8)])
    return [
        step_batch(number, (100 * number, 100 * number + 100), steps, worker="w", role="prefill", gpus=2)
        for number, steps in enumerate(by_batch)
    ]


def encoded() -> Instance:
    """Return an instance that has written the windows of `batches`, beside those of a worker without images."""
    instance = Instance("a")
    for number, batch in enumerate(batches()):
        instance.read(batch, 100 * number + 100)
        instance.live("other", 100 * number, 100 * number + 100)
        instance.state.history.advance(at(100 * number + 100))
    return instance


def encode_ms(rollups: RollUps, worker: str = "w", to_ms: int = 300) -> list[int]:
    found = rollups.read(TICK_NS, at(0), at(to_ms), [worker]).encode_ns
    return [0] * (to_ms // 100) if found is None else (found[:, 0] // MS).tolist()


def test_windows_show_an_encode_once_it_has_ended_in_every_tier() -> None:
    instance = encoded()
    assert encode_ms(instance.rollups) == [50, 100, 50]
    assert encode_ms(instance.rollups, "other") == [0, 0, 0]
    for tier in TIERS[1:3]:
        low_ns = ORIGIN_NS // tier.window_ns * tier.window_ns
        found = instance.rollups.read(tier.window_ns, low_ns, low_ns + 2 * tier.window_ns, ["w"])
        assert found.encode_ns is not None
        assert (found.encode_ns.sum() // MS, found.times_ns[:, 0, 1].sum() // MS) == (200, 230)


def test_history_sums_encoding_over_gpus_as_a_part_of_prefill() -> None:
    state = encoded().state
    for scope, expected in (("cluster", [100, 200, 100]), ("worker:w", [100, 200, 100]), ("worker:other", [0, 0, 0])):
        wanted = parse_scope(scope)
        pieces = list(sums(state.members, state.rollups, wanted, TIERS[0], (at(0), at(300))))
        found = history(pieces, wanted, TICK_NS, at(300)).gpu_ns
        assert [each // MS for each in found.encode] == expected
        assert all(part <= whole for part, whole in zip(found.encode, found.prefill, strict=True))


def test_stored_windows_keep_encoding_and_those_without_are_as_before(tmp_path: Path) -> None:
    instance = encoded()
    taken = instance.rollups.take_changed(at(200))
    file = HistoryFile(tmp_path / "history.sqlite", "local", TIERS[1:])
    file.save(HistorySnapshot(at(200), instance.state.members.all(), taken))
    restored = RollUps()
    for kept in file.windows():
        restored.restore(kept)
    file.close()
    low_ns = ORIGIN_NS // TIERS[1].window_ns * TIERS[1].window_ns
    for worker, expected in (("w", 150), ("other", 0)):  # of the time before 200 ms
        found = restored.read(TIERS[1].window_ns, low_ns, low_ns + 2 * TIERS[1].window_ns, [worker]).encode_ns
        assert found is not None and found.sum() // MS == expected
    plain = Instance("b")
    plain.live("other", 0, 300)
    plain.state.history.advance(at(300))
    assert all(kept.encode_ns is None for kept in plain.rollups.take_changed(at(200)))


def test_instances_exchange_encoding_and_an_older_one_sends_none() -> None:
    teller, hearer, older = Instance("a"), Instance("b"), Instance("c")
    for number, batch in enumerate(batches()):
        teller.read(batch, 100 * number + 100)
        messages = teller.tick(100 * number + 110)
        hearer.hear(messages, 100 * number + 120)
        hearer.tick(100 * number + 130)
        for message in messages:
            for window in message.loads.windows:
                window.ClearField("encode_ns")
        older.hear(messages, 100 * number + 120)
        older.tick(100 * number + 130)
    assert encode_ms(hearer.rollups) == encode_ms(teller.rollups) == [50, 100, 50]
    assert encode_ms(older.rollups) == [0, 0, 0]


def test_a_window_with_more_encoding_than_prefill_is_refused() -> None:
    teller = Instance("a")
    teller.read(step_batch(0, (0, 100), [encoding(10, 60)], worker="w", role="prefill"), 100)
    (window,) = (each for message in teller.tick(110) for each in message.loads.windows)
    assert cells_of_columns(window, ["w"], TICK_NS).encode_ns == [50 * MS]
    window.encode_ns = np.array([50 * MS + 1], "<u4").tobytes()
    with pytest.raises(ValueError, match="more encode time than prefill time"):
        cells_of_columns(window, ["w"], TICK_NS)
    window.encode_ns = np.array([1, 1], "<u4").tobytes()
    with pytest.raises(ValueError, match="lengths"):
        cells_of_columns(window, ["w"], TICK_NS)


def test_the_bytes_of_windows_end_with_encoding_where_there_is_any() -> None:
    state = encoded().state
    for workers, expected in ((["other", "w"], [0, 50, 0, 100, 0, 50]), (["other"], None)):
        packed = pack(state.rollups.read(TICK_NS, at(0), at(300), workers), state.members, at(300))
        (length,) = struct.unpack("<I", packed[:4])
        roles_end = 4 + length + 3 * len(workers) * (4 * 4 + 1)
        assert json.loads(packed[4 : 4 + length])["encodes"] is (expected is not None)
        begin = -(-roles_end // 8) * 8
        if expected is None:
            assert len(packed) == roles_end
        else:
            assert (np.frombuffer(packed, "<u4", offset=begin) // MS).tolist() == expected


def test_the_stream_sends_encoding_where_there_is_any() -> None:
    instance, writer = Instance("a"), TickWriter(window_ns=TICK_NS, settled_ns=TICK_NS)
    found = []
    for number, batch in enumerate(batches()):
        instance.read(batch, 100 * number + 100)
        written = instance.state.history.advance(at(100 * number + 100))
        loads = instance.fleet.directory.loads(at(100 * number + 100))
        writer.members(loads.listing)
        sent = writer.tick(at(100 * number + 100), written, loads, [], [], queues=[])
        tick = json.loads(sent.split(b"data: ")[1])
        found.append((len(tick["windows"]), tick.get("encode")))
    # The last tick revises two windows too.
    assert found == [(1, None), (1, None), (3, [[50 * MS], [100 * MS], [50 * MS]])]
