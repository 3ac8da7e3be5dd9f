"""Accuracy of predicted TTFT: first tokens are recorded, and bindings read the ratios."""

from collections import OrderedDict
from typing import Final

from libs.dispatch.generation import Generation, RequestTimes
from libs.policy.ratios import LEVELS, Ratios

# Models remembered; the one whose last first token is oldest is forgotten first.
MOST_MODELS: Final = 256


class Experience:
    """By model, the ratios of actual to predicted time from binding to the first token at this gateway."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Ratios] = OrderedDict()

    def first_token(self, generation: Generation) -> None:
        """Record a first token from the workers that its request was first bound to."""
        timeline = generation.timeline
        took_ns = timeline.first_token_ns - timeline.bound_ns
        found = self._models.get(generation.model)
        if found is None:
            found = self._models[generation.model] = Ratios()
            if len(self._models) > MOST_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(generation.model)
        found.add(timeline.predicted_first_ns - timeline.bound_ns, took_ns)

    def bound(self, model: str, timeline: RequestTimes) -> None:
        """Set the likely times of the first token of a request that has just been bound."""
        found = self._models.get(model)
        if found is None or timeline.likely_first_ns:
            return
        predicted_ns = timeline.predicted_first_ns - timeline.bound_ns
        ratios = [found.quantile(level) for level in LEVELS]
        if None not in ratios:
            timeline.likely_first_ns = tuple(timeline.bound_ns + round(predicted_ns * (each or 0.0)) for each in ratios)
