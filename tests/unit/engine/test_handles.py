"""KV handles: nobody foretells one, and all of their chance comes from outside."""

from random import Random

from libs.engine.kv_blocks import HANDLE_BYTES, HandleTable


def opaques(table: HandleTable, count: int) -> list[bytes]:
    return [table.open(sequence_id, [sequence_id]).opaque for sequence_id in range(count)]


def test_two_tables_of_one_seed_make_the_same_handles_and_of_another_seed_no_same_one() -> None:
    one, again, other = (
        HandleTable(random_bytes=Random(seed).randbytes, lease_ns=1, left_lease_ns=1) for seed in (1, 1, 2)
    )
    first = opaques(one, 100)
    assert first == opaques(again, 100)
    assert not set(first) & set(opaques(other, 100))
    assert {len(opaque) for opaque in first} == {HANDLE_BYTES} and len(set(first)) == 100
