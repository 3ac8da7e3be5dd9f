"""For which phase requests wait. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.policy.gateway.view import WorkerView


class Queued(Protocol):
    """A request in the queue."""

    @property
    def model(self) -> str:
        """That it asks."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        ...

    @property
    def decodes_next(self) -> bool:
        """Whether its prompt is computed, and its blocks wait for a decode worker."""
        ...


@dataclass(slots=True)
class Queue:
    """What waits for a model, by the phase that has no room."""

    model: str
    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_prompt_tokens: int = 0
    hopeful_tokens: int = 0
    """Prompt tokens of all of them that can still have their first token in time."""
    arrived_tokens: int = 0
    """Prompt tokens of all requests so far, lines of batch jobs left out."""
    batch_requests: int = 0
    """Of those that wait, lines of batch jobs."""
    batch_tokens: int = 0
    """Of their prompts."""
    batch_bound: int = 0
    """Lines of batch jobs that workers have."""

    @property
    def waits(self) -> bool:
        """Whether anything does."""
        return bool(self.prefill_requests or self.decode_requests)


def model_queues(waiting: Iterable[Queued], workers: Sequence[WorkerView]) -> list[Queue]:
    """By model, for which phase choices wait. Pure.

    Choices are bound in order: what holds up the first of a model holds up all whose prompt is yet to be computed.
    """
    found: dict[str, Queue] = {}
    lacks_decode: dict[str, bool] = {}
    for each in waiting:
        model = each.model
        if model not in found:
            found[model] = Queue(model)
            lacks_decode[model] = lacks_decode_only([view for view in workers if view.model == model])
        queue = found[model]
        if each.decodes_next:
            queue.decode_requests += 1
        elif lacks_decode[model]:
            queue.decode_requests += 1
            queue.decode_prompt_tokens += each.tokens
        else:
            queue.prefill_requests += 1
            queue.prefill_tokens += each.tokens
    return list(found.values())


def lacks_decode_only(workers: Sequence[WorkerView]) -> bool:
    """Whether workers of a model could compute a prompt, if only there were a place for its tokens. Pure."""
    if not workers or any(view.decode_credits > 0 for view in workers if view.takes_decode or view.takes_both):
        return False
    prompts = [view.prefill_credits > 0 for view in workers if view.takes_prefill]
    return any(prompts) or not prompts
