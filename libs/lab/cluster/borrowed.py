"""A rival's decisions about roles over our gateway, with our order, late binding, guard and moves.

This shows what a rival's policy is worth apart from its mechanism. Prompts that wait in our gateway would wait at
workers in the rival's own system, so its mover sees an even share of them at each prefill worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.watch import Watch
from libs.lab.cluster.worker import LabWorker
from libs.lab.rivals.port import RivalMover, SeenCluster, SeenWorker, Slo
from libs.policy.roles import Role

# Cached prefixes matter only to a rival's router, and here our gateway binds.
NO_KEYS: Final[list[bytes]] = []


class BorrowedMover:
    """A driver that consults the rival's mover at the rival's interval and carries out its moves as role changes."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        time: VirtualTime,
        mover: RivalMover,
        slo: Slo,
        waiting: Callable[[], tuple[int, int]],
    ) -> None:
        """`waiting` returns (prompts, their tokens) in the gateway, and `slo` is that of a typical request."""
        self._workers = workers
        self._time = time
        self._mover = mover
        self._waiting = waiting
        self._watch = Watch(workers, time, slo, keep_steps=mover.wants_steps)
        self._before_token: dict[int, LabAnswer] = {}
        """Requests by number whose first token the watch has not recorded."""

    def start(self) -> None:
        self._time.at_ps(self._time.now_ps + self._mover.every_ns * PS_PER_NS, self._look)

    def arrived(self, answer: LabAnswer) -> None:
        self._watch.arrived(answer, NO_KEYS)
        self._before_token[answer.request.number] = answer

    def ended(self, answer: LabAnswer) -> None:
        if self._before_token.pop(answer.request.number, None) is not None and answer.tokens:
            self._watch.first_token(answer)
        self._watch.ended(answer)

    def _look(self) -> None:
        for number, answer in list(self._before_token.items()):
            if answer.tokens:
                del self._before_token[number]
                self._watch.first_token(answer)
        seen = self._watch.seen()
        for move in self._mover.moves(replace(seen, workers=self._with_waiting(seen))):
            if not self._workers[move.index].down:
                self._workers[move.index].set_role(move.role, move.budget_tokens)
        self._time.at_ps(self._time.now_ps + self._mover.every_ns * PS_PER_NS, self._look)

    def _with_waiting(self, seen: SeenCluster) -> list[SeenWorker]:
        takers = [worker for worker in seen.workers if worker.ready and _computes_prompts(worker)]
        prompts, tokens = self._waiting()
        if not takers or not prompts:
            return list(seen.workers)
        share, share_tokens = max(prompts // len(takers), 1), tokens // len(takers)
        squares = share_tokens**2 // share
        indexes = {worker.index for worker in takers}
        return [
            replace(
                worker,
                prompts=worker.prompts + share,
                prompt_tokens=worker.prompt_tokens + share_tokens,
                backlog_ns=worker.backlog_ns + worker.speed.prompt_ns(share_tokens, squares),
            )
            if worker.index in indexes
            else worker
            for worker in seen.workers
        ]


def _computes_prompts(worker: SeenWorker) -> bool:
    return worker.role is Role.PREFILL or worker.budget_tokens > 0
