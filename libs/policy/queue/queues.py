"""Count waiting requests by the phase that lacks room."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.policy.gateway.view import WorkerView


class Queued(Protocol):
    """A waiting request, as far as counting it by phase needs."""

    @property
    def model(self) -> str: ...

    @property
    def tokens(self) -> int:
        """The tokens of the prompt and the output so far."""
        ...

    @property
    def decodes_next(self) -> bool:
        """Whether its prompt is computed and its blocks wait for a decode worker."""
        ...


@dataclass(slots=True)
class Queue:
    """The requests waiting for one model, by the phase that has no room."""

    model: str
    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_prompt_tokens: int = 0
    hopeful_tokens: int = 0
    """The prompt tokens of all waiting requests whose first token can still be in time."""
    arrived_tokens: int = 0
    """The prompt tokens of all requests ever received, without batch lines."""
    batch_requests: int = 0
    """The waiting requests that are batch lines."""
    batch_tokens: int = 0
    """The prompt tokens of the waiting batch lines."""
    batch_bound: int = 0
    """The batch lines that are bound to workers."""

    @property
    def waits(self) -> bool:
        return bool(self.prefill_requests or self.decode_requests)


def model_queues(waiting: Iterable[Queued], workers: Sequence[WorkerView]) -> list[Queue]:
    """Return the queue of each model with waiting requests.

    Requests are bound in order, so whatever holds up the first one of a model holds up all with uncomputed prompts.
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
    """Return whether a model's workers could compute a prompt if only there were a place for its tokens."""
    if not workers or any(view.decode_credits > 0 for view in workers if view.takes_decode or view.takes_both):
        return False
    prompts = [view.prefill_credits > 0 for view in workers if view.takes_prefill]
    return any(prompts) or not prompts
