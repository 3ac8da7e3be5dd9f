"""A worker's time by phase, in integer nanoseconds that add up exactly."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Covered time and its phases in ns; `idle_ns` is what no step and no KV wait claims."""

    covered_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    kv_wait_ns: int = 0
    provisional: bool = False
    """Whether part of the time is a step that still runs."""

    @property
    def idle_ns(self) -> int:
        return self.covered_ns - self.prefill_ns - self.decode_ns - self.kv_wait_ns

    def times(self, gpus: int) -> "PhaseTime":
        """Return the same time in GPU-nanoseconds of a worker with `gpus` GPUs."""
        return PhaseTime(
            self.covered_ns * gpus,
            self.prefill_ns * gpus,
            self.decode_ns * gpus,
            self.kv_wait_ns * gpus,
            self.provisional,
        )

    def __add__(self, other: "PhaseTime") -> "PhaseTime":
        return PhaseTime(
            self.covered_ns + other.covered_ns,
            self.prefill_ns + other.prefill_ns,
            self.decode_ns + other.decode_ns,
            self.kv_wait_ns + other.kv_wait_ns,
            self.provisional or other.provisional,
        )
