"""What a measurement of prefill brought."""

from dataclasses import dataclass

from libs.perfmodel.saturation import Saturation


@dataclass(frozen=True, slots=True)
class Tuned:
    """The curve with its knee, and the chunk size that was in effect before."""

    saturation: Saturation
    before_tokens: int
