"""Arrivals of each model, and the share of batch jobs in its queue."""

from collections import Counter
from dataclasses import replace
from typing import Final

from libs.dispatch.generation import Generation
from libs.dispatch.ports import Links
from libs.dispatch.waiting import WaitingQueue
from libs.policy.queue.queues import Queue, model_queues

# Arrivals of further models are not counted.
MAX_MODELS: Final = 64


class Arrivals:
    """Counts choices from their arrival until they end."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()
        """Lines of batch jobs that have not ended, by model."""

    def came(self, generation: Generation) -> None:
        """Count a new choice; one that is requeued after losing its worker does not count again."""
        if generation.batch:
            self._lines[generation.model] += 1
        elif generation.model in self._tokens or len(self._tokens) < MAX_MODELS:
            self._tokens[generation.model] += generation.prompt_tokens

    def ended(self, generation: Generation) -> None:
        """Record the end of a choice that was counted."""
        if generation.batch:
            self._lines[generation.model] -= 1
            if not self._lines[generation.model]:
                del self._lines[generation.model]

    def queues(self, waiting: WaitingQueue, links: Links) -> list[Queue]:
        """Return what waits by model and phase with the arrivals, including models for which nothing waits."""
        found = {each.model: each for each in (model_queues(waiting, links.views()) if len(waiting) else ())}
        models = [*found, *((self._tokens.keys() | self._lines.keys()) - found.keys())]
        return [self._with_waiting(found.get(model) or Queue(model), waiting) for model in models]

    def _with_waiting(self, queue: Queue, waiting: WaitingQueue) -> Queue:
        lines, tokens = waiting.batch_of(queue.model)
        return replace(
            queue,
            hopeful_tokens=waiting.hopeful_of(queue.model),
            arrived_tokens=self._tokens[queue.model],
            batch_requests=lines,
            batch_tokens=tokens,
            batch_bound=max(self._lines[queue.model] - lines, 0),
        )
