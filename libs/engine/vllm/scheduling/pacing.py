"""What the next step of vLLM's takes on, by our own core's rules (libs/policy/worker/pace.py). Pure, without vLLM."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import Pace
from libs.policy.worker.slack import TokenLine


class PacedRequest:
    """A request of vLLM's as the pace sees it."""

    has_room = True
    """vLLM itself finds room, or preempts."""

    def __init__(
        self,
        request: Any,
        *,
        transferred: bool = False,
        yields: bool = False,
        tpot_target_ns: int = 0,
        first_token_due_ns: int = 0,
        stored: bool = False,
        kind: str = "",
        tokens_a_step: int = 1,
    ) -> None:
        """`tokens_a_step`: that it decodes in one step at most, drafts included."""
        self.request = request
        self._tokens_a_step = tokens_a_step
        self.transferred = transferred
        self.stored = stored
        """Whether its KV is in a store: it computes what is missing there, like one that comes again."""
        self.yields = yields
        self.kind = kind
        self.tpot_target_ns = tpot_target_ns
        self._first_token_due_ns = first_token_due_ns
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
    def needs(self) -> int:
        """Tokens that it has to compute yet, drafts included."""
        request = self.request
        wanted = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return max(int(wanted), 0)

    @property
    def line(self) -> TokenLine | None:
        """When its tokens are due; None without a target, or before its first token."""
        if not self.tpot_target_ns or not self.first_token_ns:
            return None
        # Nobody knows which drafts will be taken: a step under way counts as one token.
        under_way = -(-self.request.num_output_placeholders // self._tokens_a_step)
        return TokenLine(self.first_token_ns, self.tpot_target_ns, int(self.request.num_output_tokens + under_way) - 1)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled here so far, those of steps under way included."""
        return int(self.request.num_output_tokens + self.request.num_output_placeholders)

    @property
    def most_left(self) -> int:
        """Tokens that may be sampled yet."""
        return max(int(self.request.max_tokens) - self.output_tokens, 0)

    @property
    def ends_under_way(self) -> bool:
        """Whether a step under way samples its last token: vLLM computes it no more, by the same reckoning."""
        request, placeholders = self.request, self.request.num_output_placeholders
        return bool(
            placeholders
            and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        )

    @property
    def first_token_due_ns(self) -> int:
        """When its first token is wanted; 0: it is out, or nobody has said."""
        return 0 if self.first_token_ns else self._first_token_due_ns

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
    lost: Items[PacedRequest]
    """Preempted ones that run again and compute what they lost, and stored ones that compute what was not kept."""
    preempted: Items[PacedRequest]
    """Those that wait for that, in their order."""
    free_places: int
    free_blocks: int
    """Where layers are in groups, of each: a sequence takes as many of all."""
    stalled: bool
    """Whether the step before computed nothing, and somebody stood aside."""


@dataclass(frozen=True, slots=True)
class PacedStep:
    """What one step computes."""

    tokens: int
    """That it computes at most."""
    aside: Items[PacedRequest]
    """Who takes no part."""
    each: int = 0
    """Tokens that one request computes at most; 0: no bound."""


def plan_step(pace: Pace, queues: Queues, *, tokens_each: int, block_size_tokens: int, now_ns: int) -> PacedStep:
    """Decodes first, newcomers with `tokens_each`; then prompts as far as running TPOT targets and the budget let them.

    What preempted ones lost is not the prompts' affair: it has a chunk of its own, but only where they can use it.
    """
    for each in queues.decodes:
        each.joined = True
    decodes = pace.decodes([*queues.decodes, *queues.arrived], now_ns)
    decoding = set(map(id, decodes))
    held = [each for each in queues.arrived if id(each) not in decoding]
    yielding = _that_yield(queues, block_size_tokens)
    aside = set(map(id, yielding))
    partly = [each for each in queues.partly if id(each) not in aside]
    waiting = [each for each in queues.prompts if id(each) not in aside]
    prompt_tokens = pace.prompt_tokens(decodes, [*partly, *waiting], now_ns)
    if not prompt_tokens:
        held += waiting
    again = _that_comes_again(queues, len(decodes), block_size_tokens)
    joining = len(decodes) - len(queues.decodes)
    parked, most = _beside(queues, partly, prompt_tokens, newcomers=joining + queues.pulls + len(again))
    tokens = sum(each.needs for each in queues.decodes) + joining * tokens_each + queues.pulls + prompt_tokens
    tokens += min(sum(each.needs for each in (*queues.lost, *again)), pace.chunk_tokens)
    return PacedStep(tokens, [*held, *yielding, *parked], most)


def _beside(
    queues: Queues, partly: list[PacedRequest], prompt_tokens: int, *, newcomers: int
) -> tuple[list[PacedRequest], int]:
    """Which partly computed prompts stand aside beside newcomers, and how much the others may compute each.

    vLLM serves what runs before what waits: without a bound they would take what the newcomers are to have. They do
    not stand aside where decodes could come to need their blocks.
    """
    if not newcomers or not partly:
        return [], 0
    alone = not prompt_tokens or bool(queues.lost)
    parked = partly if alone else partly[1:]
    stay = queues.stalled or len(queues.decodes) + newcomers > queues.free_blocks
    return ([] if stay else parked), (0 if alone else prompt_tokens)


def _that_comes_again(queues: Queues, decodes: int, block_size_tokens: int) -> Items[PacedRequest]:
    """The first preempted one that waits, if there is room for it, or nothing whose pace it could break."""
    first = queues.preempted[:1]
    if not first or not decodes:
        return first
    fits = queues.free_places and _blocks(first[0], block_size_tokens) + decodes <= queues.free_blocks
    return first if fits else ()


def _that_yield(queues: Queues, block_size_tokens: int) -> list[PacedRequest]:
    """Prompts that yield, where another one can be computed: in one step they would lengthen its wait.

    It can where there is room for all of it beside the decodes. Else those that yield stay: vLLM preempts them first.
    What vLLM has room for is reckoned: where a step computed nothing, those that hold blocks go on for a step.
    """
    others = [each for each in queues.partly if not each.yields]
    if not others and queues.free_places:
        others = [each for each in queues.prompts if not each.yields][:1]
    needed = [_blocks(each, block_size_tokens) for each in others[:1]]
    if not needed or needed[0] + len(queues.decodes) > queues.free_blocks:
        return []
    partly = () if queues.stalled else queues.partly
    return [each for each in (*partly, *queues.prompts) if each.yields]


def _blocks(request: PacedRequest, block_size_tokens: int) -> int:
    """Blocks that it needs beside those that it has."""
    return -(-(request.length - request.computed) // block_size_tokens)


def begins_ns(model: StepTimeModel | None, in_flight: Items[tuple[StepWork, int]], ended_ns: int, now_ns: int) -> int:
    """When a step that is decided now begins: after those under way, each with the time of its decision."""
    if model is None or not in_flight:
        return now_ns
    start_ns = max(in_flight[0][1], ended_ns)
    return max(now_ns, start_ns + round(sum(model.step_ns(work) for work, _ in in_flight)))
