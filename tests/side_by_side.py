"""A scheduler for pytest-xdist: modules in parallel, then one by one those that need the machine to themselves."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = "alone"
MARK = "pytest.mark.alone"


class AloneLast(LoadScopeScheduling):
    """A scheduler whose unit of work is a module. Modules with MARK form one unit, which waits until all others have
    ended. The scheduling process collects no tests, but has their ids and their files.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the order is that of the tests (tests/tiers.py)
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", maxsplit=1)[0]
        if module not in self._scopes:
            marked = MARK in (self.config.rootpath / module).read_text()
            self._scopes[module] = ALONE if marked else module
        return self._scopes[module]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if ALONE in self.workqueue:
            self.workqueue.move_to_end(ALONE)
        if list(self.workqueue) != [ALONE] or not self._others_pending(node):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if list(self.workqueue) != [ALONE]:
            super()._reschedule(node)
            return
        *others, last = self.nodes
        for each in others:
            if not each.shutting_down:
                each.shutdown()  # with its remaining modules
        if not self._others_pending(last):
            super()._reschedule(last)
        if not self.workqueue:
            last.shutdown()

    def _others_pending(self, node: WorkerController) -> int:
        return sum(self._pending_of(work) for each, work in self.assigned_work.items() if each is not node)
