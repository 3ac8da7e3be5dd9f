"""A simulated GPU shared by workers of one process, which take turns for steps and for copies over its link."""

import asyncio


class SimGpu:
    """A GPU shared by the runners that are given it. A runner without one has a GPU of its own.

    Turns are first come, first served: of n workers with work, each gets every n-th step.
    """

    def __init__(self) -> None:
        self.steps = asyncio.Lock()
        """Held for the duration of a step."""
        self.link = asyncio.Lock()
        """Held while weights are copied to the GPU or from it."""
