"""One simulated GPU under several workers of a process: their steps take turns, and so do copies over its link."""

import asyncio


class SimGpu:
    """Shared by the runners that are given it; a runner without one has a GPU of its own. Turns are first come, first
    served: a worker with work gets every n-th step of n that have some."""

    def __init__(self) -> None:
        self.steps = asyncio.Lock()
        """Held for the time of a step."""
        self.link = asyncio.Lock()
        """Held while weights are copied to the GPU or from it."""
