"""Properties of reservations: accepted or refused with their conflicts, minute by minute."""

from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.reserve.pool import DAY_MINUTES, GpuClaim, kept_at, refusal
from libs.testing.examples import examples

minutes = st.sampled_from([0, 1, 60, 540, 720, 1_080, 1_439])
claims = st.builds(
    GpuClaim, st.sampled_from("abcd"), st.integers(1, 5), st.sampled_from(["floor", "pin", "reservation"]),
    minutes, minutes, st.integers(-1, 1),
)  # fmt: skip


@settings(max_examples=examples(200))
@given(st.lists(claims, max_size=6), claims, st.integers(1, 10))
def test_an_accepted_reservation_fits_at_every_minute_and_a_refused_one_fails_at_the_named_one(
    held: list[GpuClaim], wanted: GpuClaim, gpus: int
) -> None:
    everything = [*[each for each in held if each != wanted], wanted]
    refused = refusal(held, wanted, gpus)
    fits = all(
        sum(kept_at(everything, minute).values()) <= gpus for minute in range(DAY_MINUTES) if wanted.holds_at(minute)
    )
    assert (refused is None) == fits
    if refused is not None:
        assert sum(kept_at(everything, refused.minute).values()) == gpus + refused.missing_gpus
        going = refused.would_have_to_go
        if going:
            left = [each for each in everything if each not in going]
            assert sum(kept_at(left, refused.minute).values()) <= gpus
            assert all(each.holds_at(refused.minute) and each.model != wanted.model for each in going)


def test_a_reservation_past_midnight_holds_on_both_sides_of_it() -> None:
    night = GpuClaim("a", 2, "reservation", 22 * 60, 6 * 60)
    assert [night.holds_at(hour * 60) for hour in (21, 22, 23, 0, 5, 6)] == [False, True, True, True, True, False]


def test_the_least_important_claims_are_displaced_first() -> None:
    held = [
        GpuClaim("a", 2, "reservation", priority=1),
        GpuClaim("b", 1, "floor"),
        GpuClaim("c", 4, "reservation", 0, 60),
    ]
    refused = refusal(held, GpuClaim("d", 2, "reservation", 540, 1_080), 4)
    assert refused is not None
    assert (refused.missing_gpus, [each.model for each in refused.would_have_to_go]) == (1, ["b"])
