"""Lab hardware derived from what the workers of a running suite have measured about themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from libs.contracts.errors import InvalidRequest
from libs.lab.hardware import Hardware
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.perfmodel.profiles import Profile


@dataclass(frozen=True, slots=True)
class Learned:
    """What one worker has measured and published about itself."""

    worker_id: str
    engine: str
    model: str
    device: str
    gpus: int
    fitted: FittedModel
    chunk_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    block_tokens: int
    max_sequences: int
    kv_token_ns: float = 0.0
    """Time to receive the KV of one token; 0 if none was received."""
    round_trip_ms: float = 0.0
    """Network round trip to the worker; 0 if it was not measured."""

    @property
    def kind(self) -> tuple[str, str, str, int]:
        """The key of workers that take the same time for equal steps."""
        return self.engine, self.model, self.device, self.gpus


def calibrated(name: str, workers: Sequence[Learned]) -> tuple[Hardware, tuple[str, ...]]:
    """Return the hardware of workers of one kind, and notes on the parts that were not measured.

    Each kind of step is taken from the worker that has seen most of them, since prefill workers know little of
    decode. Raises InvalidRequest without workers, and for workers of several kinds.
    """
    if not workers:
        raise InvalidRequest("no worker has published a learned step-time model")
    kinds = {each.kind: each.worker_id for each in workers}
    if len(kinds) > 1:
        found = "; ".join(f"{model} on {device} ({example})" for (_, model, device, _), example in kinds.items())
        raise InvalidRequest(f"workers of {len(kinds)} kinds run: {found}; name a worker of one kind with --worker")
    best = {kind: _knows_most(workers, kind) for kind in StepKind}
    fits = {kind: each.fitted for kind, each in best.items()}
    unseen = [kind.value for kind, fit in fits.items() if not fit.of(kind).steps]
    prompts = best[StepKind.PREFILL]
    kv_bytes_per_token = prompts.kv_block_bytes // prompts.block_tokens
    profile = Profile(
        name=name,
        step_time=combine(workers[0].fitted.model, fits),
        kv_bytes_per_token=kv_bytes_per_token,
        kv_memory_bytes=min(each.kv_blocks for each in workers) * prompts.kv_block_bytes,
        gpus=prompts.gpus,
    )
    links = [each.kv_token_ns for each in workers if each.kv_token_ns]
    trips = [each.round_trip_ms for each in workers if each.round_trip_ms]
    hardware = Hardware(
        profile,
        mixed_measured=StepKind.MIXED.value not in unseen,
        chunk_tokens=prompts.chunk_tokens,
        hop_ms=median(trips) / 2 if trips else None,
        link_gbps=kv_bytes_per_token * 8 / median(links) if links else None,
        max_sequences=min(each.max_sequences for each in workers),
    )
    notes = []
    if unseen:
        notes.append(f"No {' or '.join(unseen)} step was seen since these workers began: what is kept, or a guess.")
    if not links:
        notes.append("No KV was transferred lately: the lab's own link is taken.")
    return hardware, tuple(notes)


def _knows_most(workers: Sequence[Learned], kind: StepKind) -> Learned:
    return max(workers, key=lambda each: each.fitted.of(kind).steps)
