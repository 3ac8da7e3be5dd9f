"""The properties shared by a cluster's workers, and the counters of one of them."""

from dataclasses import dataclass

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
    """The most prompt tokens in a step."""
    link_bytes_per_s: float
    hop_ns: int
    """One-way delay between a worker and the gateway or another worker."""
    guard: bool = True
    """Whether prompts and new sequences are limited to protect the TPOT of running decodes."""
    prompt_order: PromptOrder | None = None
    """The order of the prompts on a worker; None for first come, first served."""
    credits: bool = True
    """Whether work is accepted only against credits; False where it queues in workers."""
    stepwise: bool = False
    """Whether every step is simulated singly, which is slow and changes nothing else."""

    @property
    def kv_kind(self) -> str:
        # The same for all workers, so that any of them can pull from any other.
        return f"lab/{self.model}/block{self.block_tokens}"

    @property
    def hop_ps(self) -> int:
        return self.hop_ns * PS_PER_NS

    @property
    def block_ps(self) -> int:
        """Picoseconds that a KV block takes on the link."""
        return max(round(self.kv_block_bytes / self.link_bytes_per_s * 1e12), 1)


@dataclass(slots=True)
class RunCounts:
    """Counters of one worker over the whole run."""

    prompt_tokens: int = 0
    """Prompt tokens computed, counting recomputed ones each time."""
    decode_tokens: int = 0
    steps: int = 0
    moves: int = 0
