"""Prompts that wait on decode workers although a prefill worker has nothing to do.

A decode worker that lends time to prompts may have less of it than was expected when a prompt was bound: as long as
its decodes have none to spare, a prompt gets a part of a step only every few seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from libs.policy.gateway.binding import RoutingPolicy, bind
from libs.policy.gateway.view import BindingRequest, WorkerView

PATIENCE_NS: Final = 1_000_000_000
"""The least time that a prompt is left on a decode worker."""
LATE: Final = 2.0
"""The multiple of its predicted time after which a prompt is late there."""
MOST_TAKEN: Final = 16
"""The maximum number of prompts that are taken back at once; the next look takes further ones."""


class LentPrompt(NamedTuple):
    """A prompt on a decode worker that has no token yet."""

    request: BindingRequest
    """The request without its present binding, whose worker is one to avoid."""
    waited_ns: int
    predicted_ns: float
    """The time until its first token, as predicted when it was bound."""

    @property
    def is_late(self) -> bool:
        return self.waited_ns >= max(PATIENCE_NS, LATE * self.predicted_ns)


def has_nothing_to_do(view: WorkerView, now_ns: int) -> bool:
    """Return whether a worker computes nothing but prompts, has none, and may take one."""
    return view.takes_prefill and view.prefill_credits > 0 and not view.prompt_tokens and not view.backlog_ns(now_ns)


def to_take_back(
    prompts: Iterable[LentPrompt], views: Sequence[WorkerView], policy: RoutingPolicy, now_ns: int
) -> list[int]:
    """Return the sequence ids of late prompts that prefill workers without work can take, each with a decode place.

    Those that have waited longest come first.
    """
    idle = {view.id for view in views if has_nothing_to_do(view, now_ns)}
    late = sorted((each for each in prompts if each.is_late), key=lambda each: -each.waited_ns) if idle else []
    # Other workers compute none of these prompts, and stay as places to decode.
    there = [view if view.id in idle else replace(view, takes_prefill=False, takes_both=False) for view in views]
    bindings = bind((each.request for each in late[:MOST_TAKEN]), there, policy, now_ns) if late else []
    return [each.sequence_id for each in bindings]
