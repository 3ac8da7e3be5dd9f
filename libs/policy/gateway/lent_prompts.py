"""Prompts that wait on decode workers although a prefill worker has nothing to do.

A prompt goes to a decode worker that lends time when no prefill worker has a credit at that moment. As long as decodes
there have no time to spare, it gets a part of a step only every `MAX_HOLD_NS` (libs/policy/worker/pace.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from libs.policy.gateway.binding import RoutingPolicy, bind, prompt_ns
from libs.policy.gateway.view import BindingRequest, WorkerRoom, WorkerView

PATIENCE_NS: Final = 500_000_000
"""The least time that a prompt is left on a decode worker, so that short waits abort nothing."""
WORTH: Final = 2.0
"""The factor by which the rest of the expected wait must exceed the time on a prefill worker, as work is lost."""
MOST_TAKEN: Final = 16
"""The maximum number of prompts that are taken back at once; the next look takes further ones."""


class LentPrompt(NamedTuple):
    """A prompt on a decode worker that has no token yet."""

    request: BindingRequest
    """The request without its present binding, whose worker is one to avoid."""
    waited_ns: int
    predicted_ns: float
    """The time until its first token, as predicted when it was bound."""

    def waits_too_long(self, elsewhere_ns: float) -> bool:
        """Return whether it is late, or would have its first token much sooner where it takes `elsewhere_ns`."""
        rest_ns = self.predicted_ns - self.waited_ns
        return self.waited_ns >= PATIENCE_NS and (rest_ns <= 0 or rest_ns >= WORTH * elsewhere_ns)


def has_nothing_to_do(view: WorkerView, now_ns: int) -> bool:
    """Return whether a worker computes nothing but prompts, has none, and may take one."""
    return view.takes_prefill and view.prefill_credits > 0 and not view.prompt_tokens and not view.backlog_ns(now_ns)


def to_take_back(
    prompts: Iterable[LentPrompt], views: Sequence[WorkerView], policy: RoutingPolicy, now_ns: int
) -> list[int]:
    """Return the sequence ids of prompts that prefill workers without work should take, each with a decode place.

    Those that have waited longest come first.
    """
    rooms = [WorkerRoom.of(view, now_ns) for view in views if has_nothing_to_do(view, now_ns)]
    waiting = [
        each
        for each in prompts
        if (own := [prompt_ns(each.request, room) for room in rooms if room.view.model == each.request.model])
        and each.waits_too_long(min(own))
    ]
    if not waiting:
        return []
    waiting.sort(key=lambda each: -each.waited_ns)
    # Other workers compute none of these prompts, and stay as places to decode.
    idle = {room.view.id for room in rooms}
    there = [view if view.id in idle else replace(view, takes_prefill=False, takes_both=False) for view in views]
    bindings = bind((each.request for each in waiting[:MOST_TAKEN]), there, policy, now_ns)
    return [each.sequence_id for each in bindings]
