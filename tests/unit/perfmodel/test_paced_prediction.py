"""Tests of the predicted time of a prompt beside decodes whose pace is maintained."""

from hypothesis import assume, given
from hypothesis import strategies as st

from libs.perfmodel.profiles import PROFILES
from libs.policy.speed import Speed

MODEL = PROFILES["llama-70b-tp4-h100"].step_time
FREE = Speed(MODEL, 2_048)
PACED = Speed(MODEL, 2_048, paced_step_ns=47.5e6)


def test_a_prompt_beside_decodes_takes_the_number_of_steps_that_their_tpot_allows() -> None:
    decode_ns = PACED.decode_ns(32, 32 * 2_000)
    assert decode_ns < PACED.paced_step_ns
    took_ns = PACED.prompt_ns(8_192, 8_192**2, decode_ns)
    beside_ns = MODEL.most_prefill_ns(PACED.paced_step_ns, decode_ns, MODEL.reading_ns(32)) - MODEL.prefill_fixed_ns
    steps = took_ns / PACED.paced_step_ns
    work_ns = 8_192 * MODEL.prefill_token_ns + 8_192**2 * MODEL.prefill_token_squared_ns
    assert steps * beside_ns >= work_ns * 0.99
    assert took_ns > FREE.prompt_ns(8_192, 8_192**2, decode_ns)


def test_without_decodes_there_is_no_pace() -> None:
    assert PACED.prompt_ns(8_192, 8_192**2) == FREE.prompt_ns(8_192, 8_192**2)


@given(st.integers(1, 60_000), st.integers(1, 256), st.integers(0, 200_000), st.floats(1e6, 1e9))
def test_a_pace_never_makes_a_prompt_faster_and_always_ends(tokens: int, decodes: int, kv: int, step_ns: float) -> None:
    paced = Speed(MODEL, 2_048, paced_step_ns=step_ns)
    decode_ns = paced.decode_ns(decodes, kv)
    assume(decode_ns > 0)
    free_ns = FREE.prompt_ns(tokens, tokens**2, decode_ns)
    took_ns = paced.prompt_ns(tokens, tokens**2, decode_ns)
    assert free_ns <= took_ns <= max(free_ns, 100 * (FREE.prompt_ns(tokens, tokens**2) + step_ns))
    assert paced.prompt_ns(tokens + 512, (tokens + 512) ** 2, decode_ns) >= took_ns * 0.999
