"""`StepTimeModel`'s formulas over numbers or arrays of them (libs/policy/pressure/numbers.py). Pure.

Its own methods take single numbers: engines call them many times a step. A test holds the two equal.
"""

from libs.policy.pressure.numbers import N, least, most, where
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel


def reading_ns(model: StepTimeModel, sequences: N) -> N:
    """Decode's fixed part."""
    fixed_ns = (sequences > 0) * model.decode_fixed_ns
    if model.decode_matrix_ns:
        fixed_ns = fixed_ns + (sequences >= MATRIX_ROWS) * model.decode_matrix_ns
    return fixed_ns + 0.0 * sequences


def chunk_ns(model: StepTimeModel, tokens: N) -> N:
    """A prompt's first chunk, alone."""
    linear = model.prefill_fixed_ns + model.prefill_token_ns * tokens
    return most(linear + model.prefill_token_squared_ns * (tokens * tokens), model.prefill_floor_ns)


def mixed_ns(model: StepTimeModel, prefill_ns: N, decode_ns: N, read_ns: N) -> N:
    """A whole step by what its parts take alone."""
    return prefill_ns + decode_ns - (1 - model.interference) * least(prefill_ns, read_ns)


def most_prefill_ns(model: StepTimeModel, step_ns: float, decode_ns: N, read_ns: N) -> N:
    """Prompt chunks that take so long alone make a step of `step_ns`."""
    rest_ns = most(step_ns - decode_ns, 0.0)
    hidden_ns = rest_ns + (1 - model.interference) * read_ns
    if not model.interference:
        return hidden_ns
    return where(rest_ns < model.interference * read_ns, rest_ns / model.interference, hidden_ns)
