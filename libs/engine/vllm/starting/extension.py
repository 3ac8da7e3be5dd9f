"""What vLLM's own worker processes answer beside vLLM's calls."""

import torch


class MemoryReport:
    """A base class that vLLM gives its workers."""

    def fulcrum_device_memory(self) -> tuple[int, int] | None:
        """Bytes of this rank's device, and those of them that are free; None on a CPU."""
        if not torch.accelerator.is_available():
            return None
        free, total = torch.accelerator.get_memory_info()
        return total, free
