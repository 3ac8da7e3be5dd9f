"""The composition of vLLM's next step by the rules of Fulcrum's own core (libs/policy/worker/pace.py).

Pure, without vLLM.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import Pace, TokenLine
from libs.policy.worker.saturation import trial_prompts


class PacedRequest:
    """A vLLM request with the attributes that the pace reads."""

    # vLLM allocates blocks itself, and preempts requests if there are too few.
    has_room = True

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
        """Wrap a request that decodes at most `tokens_a_step` tokens per step, including drafts."""
        self.request = request
        self._tokens_a_step = tokens_a_step
        self.transferred = transferred
        self.stored = stored
        """True if another engine has written the KV to a store. Tokens that the store lacks are computed as after a
        preemption.
        """
        self.yields = yields
        self.kind = kind
        self.tpot_target_ns = tpot_target_ns
        self._first_token_due_ns = first_token_due_ns
        self.joined = False
        self.held_since_ns = 0
        self.first_token_ns = 0
        """The time at which the first token was sampled, in Unix nanoseconds; 0 before."""

    @property
    def length(self) -> int:
        """The number of tokens, including those that steps in flight sample."""
        return int(self.request.num_tokens + self.request.num_output_placeholders)

    @property
    def computed(self) -> int:
        """The number of leading tokens that have KV."""
        return int(self.request.num_computed_tokens)

    @property
    def needs(self) -> int:
        """The number of tokens still to be computed, including drafts."""
        request = self.request
        wanted = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return max(int(wanted), 0)

    @property
    def line(self) -> TokenLine | None:
        """The due times of the request's tokens; None without a TPOT target, or before the first token."""
        if not self.tpot_target_ns or not self.first_token_ns:
            return None
        # It is unknown which drafts will be accepted, so a step in flight counts as one token.
        under_way = -(-self.request.num_output_placeholders // self._tokens_a_step)
        return TokenLine(self.first_token_ns, self.tpot_target_ns, int(self.request.num_output_tokens + under_way) - 1)

    @property
    def output_tokens(self) -> int:
        """The number of tokens sampled here, including those of steps in flight."""
        return int(self.request.num_output_tokens + self.request.num_output_placeholders)

    @property
    def most_left(self) -> int:
        """The upper bound of the tokens still to be sampled."""
        return max(int(self.request.max_tokens) - self.output_tokens, 0)

    @property
    def ends_under_way(self) -> bool:
        """True if a step in flight samples the request's last token, by the same arithmetic as vLLM's scheduler."""
        request, placeholders = self.request, self.request.num_output_placeholders
        return bool(
            placeholders
            and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        )

    @property
    def first_token_due_ns(self) -> int:
        """The deadline of the first token in Unix nanoseconds; 0 if it was sampled or has no deadline."""
        return 0 if self.first_token_ns else self._first_token_due_ns

    def stepped(self, now_ns: int) -> None:
        """Record that a step that computed the request ended now."""
        if not self.first_token_ns and self.request.num_output_tokens:
            self.first_token_ns = now_ns


@dataclass(frozen=True, slots=True)
class Queues:
    """The requests of which the next step can be composed, by their state."""

    decodes: Items[PacedRequest]
    arrived: Items[PacedRequest]
    """The transferred requests that have their KV and have not decoded yet."""
    partly: Items[PacedRequest]
    """The prompts that are partly computed, in order."""
    prompts: Items[PacedRequest]
    """The prompts that wait for their first chunk, in order."""
    pulls: int
    """The number of requests whose KV has not been requested yet. Such a request decodes at once if all its KV is
    cached here.
    """
    lost: Items[PacedRequest]
    """The running requests that recompute KV lost to preemption, or compute the tokens that a store lacks."""
    preempted: Items[PacedRequest]
    """The preempted and stored requests that wait to run, in order."""
    free_places: int
    free_blocks: int
    """The number of free blocks in each group of layers. A sequence takes the same number from every group."""
    stalled: bool
    """True if the previous step computed nothing although requests were set aside."""


@dataclass(frozen=True, slots=True)
class PacedStep:
    """The bounds within which vLLM composes one step."""

    tokens: int
    """The upper bound of the tokens that the step computes."""
    aside: Items[PacedRequest]
    """The requests that the step leaves out."""
    each: int = 0
    """The upper bound of the tokens that one request computes; 0 for no bound."""


def plan_step(pace: Pace, queues: Queues, *, tokens_each: int, block_size_tokens: int, now_ns: int) -> PacedStep:
    """Plan the next step: decodes first, then prompts within the budget and the TPOT targets of running sequences.

    A request that joins the decodes gets `tokens_each` tokens. Recomputation has its own chunk of tokens, so it takes
    none from prompts. The step grows only by as much of that chunk as it needs.
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
    """Return the partly computed prompts to set aside for `newcomers`, and the token bound of each remaining one.

    vLLM serves running requests before waiting ones. Without the bound, a running prompt would take the tokens that are
    meant for the newcomers. Prompts are not set aside if decodes may need their blocks, which preemption can free.
    """
    if not newcomers or not partly:
        return [], 0
    alone = not prompt_tokens or bool(queues.lost)
    parked = partly if alone else partly[1:]
    stay = queues.stalled or len(queues.decodes) + newcomers > queues.free_blocks
    return ([] if stay else parked), (0 if alone else prompt_tokens)


def _that_comes_again(queues: Queues, decodes: int, block_size_tokens: int) -> Items[PacedRequest]:
    """Return the first waiting preempted request if it has room, or if there are no decodes that it could slow down."""
    first = queues.preempted[:1]
    if not first or not decodes:
        return first
    fits = queues.free_places and _blocks(first[0], block_size_tokens) + decodes <= queues.free_blocks
    return first if fits else ()


def _that_yield(queues: Queues, block_size_tokens: int) -> list[PacedRequest]:
    """Return the prompts to set aside because they yield; none if no other prompt can run.

    A yielding prompt would make a shared step longer for the other prompt. The other prompt can run if all of it fits
    beside the decodes. If it does not fit, the yielding prompts remain, and vLLM preempts them first. Free blocks in
    vLLM are only an estimate. After a step that computed nothing, yielding prompts with blocks therefore run again.
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
    """Return the number of blocks that the request still needs."""
    return -(-(request.length - request.computed) // block_size_tokens)


def beyond_slots(running: Iterable[int], waiting: Iterable[int], most: int) -> set[int]:
    """Return the adapters of waiting requests that get none of `most` slots on the device.

    Adapters of running requests have slots already. The adapter 0 means no adapter.
    """
    taken, beyond = set(running) - {0}, set[int]()
    for adapter in waiting:
        if adapter and adapter not in taken:
            (taken if len(taken) < most else beyond).add(adapter)
    return beyond


def begins_ns(model: StepTimeModel | None, in_flight: Items[tuple[StepWork, int]], ended_ns: int, now_ns: int) -> int:
    """Return the time at which a step decided now begins.

    `in_flight` has the steps before it, each with its decision time.
    """
    if model is None or not in_flight:
        return now_ns
    start_ns = max(in_flight[0][1], ended_ns)
    return max(now_ns, start_ns + round(sum(model.step_ns(work) for work, _ in in_flight)))


def trial_tokens(tokens: int, vocab_size: int) -> list[list[int]]:
    """Return whole prompts of random tokens, `tokens` in total."""
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
        """Add one of `prompts` prompts. Return whether the measurement is complete."""
        if not self.requests:
            self._wanted, self._tokens, self._runs = prompts, 0, False
        self.requests.append(request)
        self._tokens += request.num_tokens
        return self.due

    @property
    def due(self) -> bool:
        """True if the next step is reserved for the measurement."""
        return bool(self._wanted) and not self._runs and len(self.requests) == self._wanted

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def begun(self) -> None:
        """Record that the scheduler has decided the measurement's step."""
        self._runs = True

    def is_of(self, scheduled: dict[str, int]) -> bool:
        """Return whether a step, given by its scheduled requests, was the measurement's."""
        return self._runs and bool(self.requests) and self.requests[0].request_id in scheduled

    def over(self) -> None:
        """End the measurement, whether it succeeded or not."""
        self.requests, self._wanted, self._runs = [], 0, False
