"""Properties of which tensor-parallel widths can read each other's KV, against vLLM 0.32's own conditions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.worker.handing_over import KvSplit, width_class

WIDTHS = st.integers(1, 32)
HEADS = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 40])
ORDERS = st.sampled_from(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])


def theirs(reader: KvSplit, source: KvSplit) -> bool:
    """Return whether a decode side of one width reads a prefill side of the other, by vLLM's NIXL connector."""
    wide, narrow = max(reader.width, source.width), min(reader.width, source.width)
    if wide % narrow or (reader.order != source.order and not reader.is_latent):
        return False
    if reader.is_latent or wide == narrow:
        return True
    if source.width > reader.width and source.width > source.kv_heads:
        return False
    return source.width > source.kv_heads or reader.order in ("LBHNC", "BLHNC")


@given(WIDTHS, WIDTHS, HEADS, ORDERS, st.booleans())
def test_widths_of_one_class_can_read_each_other_both_ways(
    one: int, other: int, heads: int, order: str, latent: bool
) -> None:
    pair = [KvSplit(width, heads, is_latent=latent, order=order) for width in (one, other)]
    if width_class(pair[0]) == width_class(pair[1]):
        assert theirs(*pair) and theirs(*reversed(pair))


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), HEADS, ORDERS, st.booleans())
def test_powers_of_two_that_vllm_reads_both_ways_are_of_one_class(
    one: int, other: int, heads: int, order: str, latent: bool
) -> None:
    pair = [KvSplit(width, heads, is_latent=latent, order=order) for width in (one, other)]
    splits = latent or all(heads % width == 0 for width in (one, other))
    if splits and theirs(*pair) and theirs(*reversed(pair)) and max(one, other) <= (16 if latent else heads):
        assert one == other or width_class(pair[0]) == width_class(pair[1])


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (KvSplit(3, 3, order="LBHNC"), "tp3 (no power of two)"),
        (KvSplit(16, 8, order="LBHNC"), "tp16 (more ranks than its 8 KV heads)"),
        (KvSplit(4, 6, order="LBHNC"), "tp4 (6 KV heads do not divide)"),
        (KvSplit(2, 8, order="LBNHC"), "tp2 (heads are not apart in LBNHC)"),
        (KvSplit(2, 8), "tp2 (unknown order of KV in memory)"),
        (KvSplit(2, 8, has_states=True, order="LBHNC"), "tp2 (state-space layers)"),
        (KvSplit(8, 1, is_latent=True, context_width=8), "tp8 (8 ranks share a context)"),
        (KvSplit(2, 8, order="LBHNC", over_nixl=False), "tp2 (only NIXL reads other widths)"),
    ],
)
def test_a_width_that_reads_only_its_own_kv_gives_the_reason(split: KvSplit, says: str) -> None:
    assert width_class(split) == says


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_usual_widths_of_eight_heads_and_any_of_a_latent_are_of_one_class(width: int) -> None:
    assert width_class(KvSplit(width, 8, order="LBHNC")) == "tp2^n"
    assert width_class(KvSplit(2 * width, 1, is_latent=True, order="LBNHC")) == "tp2^n"
