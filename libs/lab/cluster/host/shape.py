"""The properties shared by a cluster's workers, the counters of one of them, and errors injected into them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from libs.lab.cluster.time import PS_PER_NS
from libs.lab.rivals.port import PromptOrder
from libs.policy.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """The properties shared by all workers of a cluster."""

    model: str
    step_time: StepTimeModel
    """The model of the duration of steps."""
    block_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    max_sequences: int
    chunk_tokens: int
    """The maximum number of prompt tokens in a step."""
    link_bytes_per_s: float
    hop_ns: int
    """One-way delay between a worker and the gateway or another worker."""
    guard: bool = True
    """True if prompts and new sequences are limited to protect the TPOT of running decodes."""
    prompt_order: PromptOrder | None = None
    """The order of the prompts on a worker; None for first come, first served."""
    credits: bool = True
    """True if work is accepted only against credits; False if it queues in workers."""
    stepwise: bool = False
    """True if every step is simulated singly, which is slow and changes nothing else."""

    @property
    def kv_kind(self) -> str:
        # The same for all workers, so that each can pull from every other.
        return f"lab/{self.model}/block{self.block_tokens}"

    @property
    def hop_ps(self) -> int:
        return self.hop_ns * PS_PER_NS

    @property
    def block_ps(self) -> int:
        """The picoseconds that a KV block takes on the link."""
        return max(round(self.kv_block_bytes / self.link_bytes_per_s * 1e12), 1)


@dataclass(slots=True)
class RunCounts:
    """Counters of one worker over the whole run."""

    prompt_tokens: int = 0
    """Prompt tokens computed; recomputed tokens count each time."""
    decode_tokens: int = 0
    steps: int = 0
    moves: int = 0


MIXER: Final = 2_654_435_761
"""Knuth's multiplicative hash, which spreads request numbers evenly and identically in every run."""
HASHES: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class InjectedErrors:
    """The errors injected into a cluster; none by default."""

    telemetry_ms: float = 0.0
    """The additional age of the planner's view in milliseconds."""
    step_times: float = 0.0
    """The share by which workers overestimate (even indices) or underestimate (odd ones) their step times."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """The factor by which steps of a worker take longer than it reports and believes."""
    hints: float = 0.0
    """The share of requests for which the index falsely reports a worker that has the whole prompt."""

    def shape(self, index: int, shape: WorkerShape) -> WorkerShape:
        """Return the shape that the worker believes it has."""
        if not self.step_times:
            return shape
        off = 1 + self.step_times if index % 2 == 0 else 1 - self.step_times
        return replace(shape, step_time=shape.step_time.scaled(off))

    def steps(self, index: int, model: StepTimeModel) -> StepTimeModel:
        """Return the true duration of the worker's steps."""
        return model.scaled(self.slow[index]) if index in self.slow else model

    def hint(self, number: int, workers: Sequence[str]) -> str:
        """Return the worker falsely reported to hold the request's prompt, or an empty string."""
        drawn = number * MIXER % HASHES / HASHES
        return workers[int(drawn / self.hints * len(workers))] if drawn < self.hints else ""
