"""What the scheduler in the EngineCore process tells the worker, and what the worker tells it. Plain data, no vLLM.

Reports travel inside vLLM's own messages, one an engine step, so they are in order with the tokens of that step.
Commands travel as requests that are never scheduled: in order with the requests before and after them.
"""

import msgspec

from libs.policy.step_time import StepTimeModel, StepWork

REPORT_KEY = "fulcrum"
"""Of the report in vLLM's statistics."""
COMMAND_KEY = "fulcrum"
"""Of the command in a request's extra arguments."""
PACE_KEY = "fulcrum_pace"
"""Of what the scheduler must know of a request beside vLLM's own parameters."""
TRIAL_KEY = "fulcrum_trial"
"""Of a made-up request that measures: how many of them make up the step."""


class Step(msgspec.Struct, array_like=True, frozen=True):
    """One step with a model call. Unix nanoseconds; fields as in libs/engine/port.py."""

    start_ns: int
    end_ns: int
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    prefill_squared_tokens: int
    decode_sequences: int
    decode_kv_tokens: int


def step_of(work: StepWork, start_ns: int, end_ns: int) -> Step:
    """What a step has computed, and when."""
    return Step(
        start_ns,
        end_ns,
        work.prefill_tokens,
        work.prefill_sequences,
        work.prefill_context_tokens,
        work.prefill_squared_tokens,
        work.decode_sequences,
        work.decode_kv_tokens,
    )


class Pulled(msgspec.Struct, array_like=True, frozen=True):
    """KV that came from another engine."""

    request_id: str
    tokens: int
    start_ns: int
    end_ns: int


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """The state of the engine as of one step's end, and what has happened since the report before."""

    now_ns: int
    taken: int
    """Requests that have reached the scheduler so far: the depths count these, and none after them."""
    running: int
    waiting: int
    waiting_prefill_tokens: int
    waiting_prefill_squares: int
    awaiting_kv: int
    free_blocks: int
    preemptions: int
    recomputed_tokens: int
    kv_wait_since_ns: int
    running_since_ns: int = 0
    """Since when a step runs that has not ended; 0: none does. Only where steps are decided while others run."""
    steps: int = 0
    """Steps with a model call that have ended so far."""
    step: Step | None = None
    kv_waits: list[tuple[int, int]] = msgspec.field(default_factory=list)
    pulling: list[str] = msgspec.field(default_factory=list)
    pulled: list[Pulled] = msgspec.field(default_factory=list)
    aborted: list[str] = msgspec.field(default_factory=list)
    released: list[str] = msgspec.field(default_factory=list)
    """Prefilled requests whose blocks wait for nobody any more: pulled, released, or their lease has ended."""
    stored: list[bytes] = msgspec.field(default_factory=list)
    """Of blocks that became reusable, by libs/contracts/hashing.py."""
    removed: list[bytes] = msgspec.field(default_factory=list)
    trial_ns: int | None = None
    """How long the step that measures has taken; 0: there was no room for it."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the worker wants of the scheduler; what is None stays as it is."""

    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    step_time: StepTimeModel | None = None
    release: list[str] = msgspec.field(default_factory=list)


def encode(value: EngineReport | Command) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(value)


def decode_report(data: bytes) -> EngineReport:
    """The inverse of `encode`."""
    return msgspec.msgpack.decode(data, type=EngineReport)


def decode_command(data: bytes) -> Command:
    """The inverse of `encode`."""
    return msgspec.msgpack.decode(data, type=Command)
