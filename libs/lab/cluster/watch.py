"""The inputs of a rival's router and mover: the workers' state, and requests since the mover's last decision."""

from collections.abc import Sequence
from dataclasses import dataclass

from libs.engine.reports import EngineLoad
from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.time import VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.lab.rivals.port import RecentRequests, SeenCluster, SeenRequest, SeenWorker, Slo


@dataclass(slots=True)
class _Sum:
    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class _Counted:
    """Sums over the requests since the mover's last decision."""

    inputs: _Sum
    outputs: _Sum


class Watch:
    """A recorder of requests that builds views of workers on demand."""

    def __init__(self, workers: Sequence[LabWorker], time: VirtualTime, slo: Slo, *, keep_steps: bool) -> None:
        self._workers = workers
        self._time = time
        self._slo = slo
        self._counted = _Counted(_Sum(), _Sum())
        self._keep_steps = keep_steps
        self.draining: set[int] = set()
        """Workers that take no new work until they change their role."""
        self._bound: dict[int, tuple[int, int]] = {}
        """Pairs (sequences, tokens) by worker for sequences that will decode there while their prompts are computed
        elsewhere.
        """
        if keep_steps:
            for worker in workers:
                worker.keep_recent_steps()

    def arrived(self, answer: LabAnswer, keys: list[bytes]) -> SeenRequest:
        """Record an arrival and return the router's view of the request."""
        request = answer.request
        self._counted.inputs.add(request.input_tokens)
        cached = [worker.core.cached_tokens(keys) for worker in self._workers] if keys else [0] * len(self._workers)
        slo = Slo(answer.ttft_limit_ns, answer.tpot_limit_ns)
        return SeenRequest(request.number, request.input_tokens, slo, cached)

    def bound(self, index: int, tokens: int, *, times: int = 1) -> None:
        """Add a request of this many tokens that will decode there. `times` is -1 once it has arrived or been
        diverted.
        """
        sequences, all_tokens = self._bound.get(index, (0, 0))
        self._bound[index] = sequences + times, all_tokens + times * tokens

    def ended(self, answer: LabAnswer) -> None:
        self._counted.outputs.add(answer.tokens)

    def seen(self) -> SeenCluster:
        """Return the mover's view of the cluster, and begin a new interval."""
        counted, self._counted = self._counted, _Counted(_Sum(), _Sum())
        interval = RecentRequests(
            arrived=counted.inputs.count,
            mean_input_tokens=counted.inputs.mean,
            ended=counted.outputs.count,
            mean_output_tokens=counted.outputs.mean,
        )
        return SeenCluster(self._time.now_ns(), self.workers(with_steps=self._keep_steps), interval, self._slo)

    def workers(self, *, with_steps: bool = False) -> list[SeenWorker]:
        """Return a view of every worker, with its recent steps on request."""
        return [self._view(worker, with_steps=with_steps) for worker in self._workers]

    def _view(self, worker: LabWorker, *, with_steps: bool) -> SeenWorker:
        load = load_now(worker, self._time)
        queued, queued_tokens = worker.core.queued_decodes()
        bound, bound_tokens = self._bound.get(worker.index, (0, 0))
        kv_tokens = queued_tokens + bound_tokens + held_tokens(worker, load)
        steps = worker.take_recent_steps() if with_steps else ()
        tokens = load.waiting_prefill_tokens
        return SeenWorker(
            index=worker.index,
            role=worker.assignment.role,
            budget_tokens=worker.assignment.budget_tokens,
            ready=worker.ready and worker.index not in self.draining,
            speed=worker.speed,
            max_sequences=worker.shape.max_sequences,
            kv_blocks=worker.shape.kv_blocks,
            block_tokens=worker.shape.block_tokens,
            prompts=worker.prompts_here,
            prompt_tokens=tokens,
            backlog_ns=worker.speed.prompt_ns(tokens, load.waiting_prefill_squares),
            decodes=load.running,
            prefills=worker.core.prefilling,
            queued_decodes=load.awaiting_kv + queued + bound,
            kv_tokens=kv_tokens,
            decode_step_ns=worker.speed.decode_ns(load.running, kv_tokens),
            free_blocks=load.free_kv_blocks,
            steps=steps,
        )


def load_now(worker: LabWorker, time: VirtualTime) -> EngineLoad:
    """Return the current queue depths, computed while steps are simulated in bulk."""
    return worker.coasted_load(time.now_ps) or worker.load()


def held_tokens(worker: LabWorker, load: EngineLoad) -> int:
    """Return the number of tokens for which a worker with this load has allocated blocks."""
    return max(worker.shape.kv_blocks - load.free_kv_blocks, 0) * worker.shape.block_tokens
