"""Measured steps in vLLM: made-up prompts, computed in one step of their own. Pure, without vLLM."""

from typing import Any

import numpy as np

from libs.policy.worker.saturation import trial_prompts


def trial_tokens(tokens: int, vocab_size: int) -> list[list[int]]:
    """Return whole prompts of random tokens that add up to `tokens`."""
    random = np.random.default_rng(tokens)
    return [random.integers(0, vocab_size or 2, length).tolist() for length in trial_prompts(tokens)]


class TrialStep:
    """The scheduler's state of one measurement, from its first prompt to the end of its step."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self._wanted = 0
        self._tokens = 0
        self._runs = False

    def add(self, request: Any, prompts: int) -> bool:
        """Add one of `prompts` prompts, and return whether it was the last."""
        if not self.requests:
            self._wanted, self._tokens, self._runs = prompts, 0, False
        self.requests.append(request)
        self._tokens += request.num_tokens
        return self.due

    @property
    def due(self) -> bool:
        """Whether the next step is reserved for the measurement."""
        return bool(self._wanted) and not self._runs and len(self.requests) == self._wanted

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def begun(self) -> None:
        """Record that its step has been decided."""
        self._runs = True

    def is_of(self, scheduled: dict[str, int]) -> bool:
        """Return whether a step was the measured one, by the requests scheduled in it."""
        return self._runs and bool(self.requests) and self.requests[0].request_id in scheduled

    def over(self) -> None:
        """End the measurement, whether it succeeded or not."""
        self.requests, self._wanted, self._runs = [], 0, False
