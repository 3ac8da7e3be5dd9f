"""What the next step of vLLM's takes on, by the rules of our own core (libs/engine/pace.py). Pure, without vLLM."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from libs.engine.pace import Pace
from libs.perfmodel import StepTimeModel, StepWork
from libs.perfmodel.slack import TokenLine


class PacedRequest:
    """A request of vLLM's as the pace sees it."""

    has_room = True
    """vLLM itself finds room, or preempts."""

    def __init__(
        self, request: Any, *, transferred: bool = False, yields: bool = False, tpot_target_ns: int = 0
    ) -> None:
        self.request = request
        self.transferred = transferred
        self.yields = yields
        self.tpot_target_ns = tpot_target_ns
        self.joined = False
        self.held_since_ns = 0
        self.first_token_ns = 0
        """When its first token was there; 0: not yet."""

    @property
    def length(self) -> int:
        """Tokens so far, those of steps under way included."""
        return int(self.request.num_tokens + self.request.num_output_placeholders)

    @property
    def computed(self) -> int:
        """Of them, how many have KV."""
        return int(self.request.num_computed_tokens)

    @property
    def line(self) -> TokenLine | None:
        """When its tokens are due; None without a target, or before its first token."""
        if not self.tpot_target_ns or not self.first_token_ns:
            return None
        came = self.request.num_output_tokens + self.request.num_output_placeholders
        return TokenLine(self.first_token_ns, self.tpot_target_ns, int(came) - 1)

    def stepped(self, now_ns: int) -> None:
        """A step that computed it has ended now."""
        if not self.first_token_ns and self.request.num_output_tokens:
            self.first_token_ns = now_ns


@dataclass(frozen=True, slots=True)
class Queues:
    """What a step can be made of."""

    decodes: Items[PacedRequest]
    arrived: Items[PacedRequest]
    """Transferred, with their KV; they have not decoded yet."""
    partly: Items[PacedRequest]
    """Prompts that are partly computed, in their order."""
    prompts: Items[PacedRequest]
    """Those that wait, in their order."""
    pulls: int
    """Requests whose KV is to be asked for; what is here already makes them decode at once."""
    again: bool
    """Whether any was preempted: what it lost is not held to the prompt budget."""
    free_places: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Of one step."""

    tokens: int
    """That it computes at most."""
    aside: Items[PacedRequest]
    """Who takes no part."""


def plan_step(pace: Pace, queues: Queues, *, tokens_each: int, block_size_tokens: int, now_ns: int) -> StepPlan:
    """Decodes of `tokens_each` tokens first, then prompts as far as running TPOT targets and the budget let them."""
    for each in queues.decodes:
        each.joined = True
    decodes = pace.decodes([*queues.decodes, *queues.arrived], now_ns)
    decoding = set(map(id, decodes))
    held = [each for each in queues.arrived if id(each) not in decoding]
    yielding = _that_yield(queues, block_size_tokens)
    aside = set(map(id, yielding))
    prompts = [each for each in (*queues.partly, *queues.prompts) if id(each) not in aside]
    prompt_tokens = pace.prompt_tokens(decodes, prompts, now_ns)
    if not prompt_tokens:
        held += (each for each in queues.prompts if id(each) not in aside)
    allowed = max(prompt_tokens, pace.chunk_tokens if queues.again else 0)
    return StepPlan(len(decodes) * tokens_each + queues.pulls + allowed, [*held, *yielding])


def _that_yield(queues: Queues, block_size_tokens: int) -> list[PacedRequest]:
    """Prompts that yield, where another one can be computed: in one step they would lengthen its wait.

    It can where there is room for all of it beside the decodes. Else those that yield stay: vLLM preempts them first.
    """
    others = [each for each in queues.partly if not each.yields]
    if not others and queues.free_places:
        others = [each for each in queues.prompts if not each.yields][:1]
    needed = [-(-(each.length - each.computed) // block_size_tokens) for each in others[:1]]
    if not needed or needed[0] + len(queues.decodes) > queues.free_blocks:
        return []
    return [each for each in (*queues.partly, *queues.prompts) if each.yields]


def begins_ns(model: StepTimeModel | None, in_flight: Items[tuple[StepWork, int]], ended_ns: int, now_ns: int) -> int:
    """When a step that is decided now begins: after those under way, each with the time of its decision."""
    if model is None or not in_flight:
        return now_ns
    start_ns = max(in_flight[0][1], ended_ns)
    return max(now_ns, start_ns + round(sum(model.step_ns(work) for work, _ in in_flight)))
