"""Calls that vLLM's worker processes answer in addition to vLLM's own."""

import torch


class MemoryReport:
    """A mix-in that vLLM adds to its worker class (`worker_extension_cls`)."""

    def fulcrum_device_memory(self) -> tuple[int, int] | None:
        """Return (total, free) bytes of this rank's device; None on a CPU."""
        if not torch.accelerator.is_available():
            return None
        free, total = torch.accelerator.get_memory_info()
        return total, free
