"""The formulas of `StepTimeModel` over numbers or arrays (see libs/policy/pressure/numbers.py).

The methods of the model take single numbers because engines call them many times a step. A test checks that both
agree.
"""

from libs.policy.pressure.numbers import N, least, most, where
from libs.policy.step_time import MATRIX_ROWS, StepTimeModel


def reading_ns(model: StepTimeModel, sequences: N) -> N:
    """Return decode's fixed time, in which the weights are read."""
    fixed_ns = (sequences > 0) * model.decode_fixed_ns
    if model.decode_matrix_ns:
        fixed_ns = fixed_ns + (sequences >= MATRIX_ROWS) * model.decode_matrix_ns
    return fixed_ns + 0.0 * sequences


def chunk_ns(model: StepTimeModel, tokens: N) -> N:
    """Return the time of a prompt's first chunk alone."""
    linear = model.prefill_fixed_ns + model.prefill_token_ns * tokens
    return most(linear + model.prefill_token_squared_ns * (tokens * tokens), model.prefill_floor_ns)


def mixed_ns(model: StepTimeModel, prefill_ns: N, decode_ns: N, read_ns: N) -> N:
    """Return the time of a step from the times of its parts alone."""
    return prefill_ns + decode_ns - (1 - model.interference) * least(prefill_ns, read_ns)


def most_prefill_ns(model: StepTimeModel, step_ns: float, decode_ns: N, read_ns: N) -> N:
    """Return the time that prompt chunks may take alone in a step of `step_ns`."""
    rest_ns = most(step_ns - decode_ns, 0.0)
    hidden_ns = rest_ns + (1 - model.interference) * read_ns
    if not model.interference:
        return hidden_ns
    return where(rest_ns < model.interference * read_ns, rest_ns / model.interference, hidden_ns)
