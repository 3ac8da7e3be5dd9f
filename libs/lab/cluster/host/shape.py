"""What workers of a cluster are like, and what one of them has done."""

from dataclasses import dataclass

from libs.lab.cluster.time import PS_PER_NS
from libs.lab.rivals.port import PromptOrder
from libs.policy.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What all workers of a cluster are like."""

    model: str
    step_time: StepTimeModel
    """What steps take."""
    block_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    max_sequences: int
    chunk_tokens: int
    """Prompt tokens of a step at most."""
    link_bytes_per_s: float
    hop_ns: int
    """From a worker to the gateway, or another worker, and back: each way."""
    guard: bool = True
    """Whether prompts and newcomers are held to the TPOT of what decodes."""
    prompt_order: PromptOrder | None = None
    """Of the prompts that it holds; None: as they came."""
    credits: bool = True
    """Whether work is taken only against credits; off where it queues in workers."""
    stepwise: bool = False
    """Every decision at every step: slow, and equal in all else."""

    @property
    def kv_kind(self) -> str:
        """Equal for all."""
        return f"lab/{self.model}/block{self.block_tokens}"

    @property
    def hop_ps(self) -> int:
        """Picoseconds of a hop."""
        return self.hop_ns * PS_PER_NS

    @property
    def block_ps(self) -> int:
        """Picoseconds that a KV block takes on the link."""
        return max(round(self.kv_block_bytes / self.link_bytes_per_s * 1e12), 1)


@dataclass(slots=True)
class RunCounts:
    """What one worker did over the whole run."""

    prompt_tokens: int = 0
    """Computed, again ones included."""
    decode_tokens: int = 0
    steps: int = 0
    moves: int = 0
    """Of role."""
