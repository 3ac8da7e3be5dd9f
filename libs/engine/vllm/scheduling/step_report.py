"""Messages between the worker and the scheduler in the EngineCore process: reports and commands. Plain data, no vLLM.

Reports travel inside vLLM's own messages, one an engine step, so they are in order with the tokens of that step.
Commands travel as requests that are never scheduled, in order with the requests before and after them.
"""

import msgspec

from libs.policy.step_time import StepTimeModel, StepWork

# Key of the report in vLLM's statistics.
REPORT_KEY = "fulcrum"
# Key of the command in a request's extra arguments.
COMMAND_KEY = "fulcrum"
# Key of a request's properties that the scheduler needs beside vLLM's own parameters.
PACE_KEY = "fulcrum_pace"
# Key in made-up requests that measure. The value is the number of them that make up the step.
TRIAL_KEY = "fulcrum_trial"


class Step(msgspec.Struct, array_like=True, frozen=True):
    """A step with a model call, in Unix nanoseconds. Its fields are those of `StepReport` in
    libs/engine/reports.py.
    """

    start_ns: int
    end_ns: int
    prefill_tokens: int
    prefill_sequences: int
    prefill_context_tokens: int
    prefill_squared_tokens: int
    decode_sequences: int
    decode_kv_tokens: int


def step_of(work: StepWork, start_ns: int, end_ns: int) -> Step:
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
    """The KV of one request that came from another engine."""

    request_id: str
    tokens: int
    start_ns: int
    end_ns: int


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """The state of the engine at the end of one step, and events since the previous report."""

    now_ns: int
    taken: int
    """Number of requests that have reached the scheduler. The depths below count only these."""
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
    """Start of a step that still runs; 0 if there is none. Nonzero only where steps are decided while others run."""
    steps: int = 0
    """Number of steps with a model call that have ended."""
    step: Step | None = None
    kv_waits: list[tuple[int, int]] = msgspec.field(default_factory=list)
    pulling: list[str] = msgspec.field(default_factory=list)
    pulled: list[Pulled] = msgspec.field(default_factory=list)
    aborted: list[str] = msgspec.field(default_factory=list)
    released: list[str] = msgspec.field(default_factory=list)
    """Prefilled requests whose blocks are no longer held: pulled, released, or their lease has ended."""
    stored: list[bytes] = msgspec.field(default_factory=list)
    """Hashes (libs/contracts/hashing.py) of blocks that became reusable."""
    removed: list[bytes] = msgspec.field(default_factory=list)
    trial_ns: int | None = None
    """Duration of the measured step; 0 if there was no room for it."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command of the worker to the scheduler. Fields that are None leave the current value."""

    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    step_time: StepTimeModel | None = None
    release: list[str] = msgspec.field(default_factory=list)


def encode(value: EngineReport | Command) -> bytes:
    """Encode a message as msgpack, for `decode_report` or `decode_command`."""
    return msgspec.msgpack.encode(value)


def decode_report(data: bytes) -> EngineReport:
    return msgspec.msgpack.decode(data, type=EngineReport)


def decode_command(data: bytes) -> Command:
    return msgspec.msgpack.decode(data, type=Command)
