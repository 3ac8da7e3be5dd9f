"""Test that KV handles are unpredictable and draw their randomness from outside."""

from random import Random

from libs.engine.kv_blocks import HANDLE_BYTES, HandleTable


def opaques(table: HandleTable, count: int) -> list[bytes]:
    return [table.open(sequence_id, [sequence_id]).opaque for sequence_id in range(count)]


def test_tables_with_one_seed_create_equal_handles_and_tables_with_another_seed_different_ones() -> None:
    one, again, other = (
        HandleTable(random_bytes=Random(seed).randbytes, lease_ns=1, left_lease_ns=1) for seed in (1, 1, 2)
    )
    first = opaques(one, 100)
    assert first == opaques(again, 100)
    assert not set(first) & set(opaques(other, 100))
    assert {len(opaque) for opaque in first} == {HANDLE_BYTES} and len(set(first)) == 100
