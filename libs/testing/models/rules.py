"""Rules for keeping models on workers: the planner's own, one model per GPU, and switching between requests."""

from collections.abc import Sequence
from typing import Final

from libs.policy.reserve.following import UNKNOWN, ModelCount, ModelPrediction, UseFollower
from libs.policy.reserve.placing import NEVER_S, place
from libs.policy.reserve.pool import PlacedModel, PoolWorker, WorkerStage
from libs.testing.models.cluster import AegaeonModel, GpuShare, ModelsLab

PERIOD_S: Final = 0.25
"""The planner's interval. A request for a model that no worker holds triggers a decision at once."""
CHANCES_S: Final = 1.0
BEGIN_S: Final = 1_700_000_000.0


class PlannerRule:
    """The live planner's decisions (`libs/policy/reserve`) on the same inputs as in the planner."""

    period_s = PERIOD_S

    def __init__(self, *, turn_s: float, cold_cost_gpu_s: float = 300.0) -> None:
        self._turn_s, self._cold_cost_gpu_s = turn_s, cold_cost_gpu_s
        self._follower = UseFollower(window_s=60.0)
        self._chances: dict[str, ModelPrediction] = {}
        self._chances_s = -1e9

    def decide(self, now_s: float, lab: ModelsLab) -> Sequence[tuple[GpuShare, AegaeonModel]]:
        """Return the orders that `place` derives from the current state."""
        in_flight = lab.in_flight()
        at_s = BEGIN_S + now_s
        uses = {name: ModelCount(lab.arrived[name], in_flight[name], BEGIN_S + lab.last_s[name]) for name in lab.models}
        self._follower.look(at_s, uses)
        loads = {name: lab.link.load_s(model) for name, model in lab.models.items()}
        if now_s - self._chances_s >= CHANCES_S:
            self._chances_s = now_s
            horizon_s = max(self._turn_s, 4 * max(loads.values()))
            self._chances = self._follower.chances(
                at_s, horizon_s=horizon_s, cold_cost_gpu_s=self._cold_cost_gpu_s, load_s=loads
            )
        models = [self._model(now_s, lab, name, loads[name], in_flight[name]) for name in lab.models]
        workers = [_worker(now_s, each) for each in lab.places]
        runs_s = self._follower.runs_s or NEVER_S
        placed = place(models, workers, turn_s=self._turn_s, sleeps=False, runs_s=runs_s)
        return [(lab.places[int(order.worker)], lab.models[order.model]) for order in placed.orders]

    def _model(self, now_s: float, lab: ModelsLab, name: str, load_s: float, in_flight: int) -> PlacedModel:
        chances, waiting = self._chances.get(name, UNKNOWN), lab.waiting[name]
        return PlacedModel(
            name=name,
            load_s=load_s,
            wake_s=load_s,
            waiting=len(waiting),
            waited_s=now_s - min(each.waits_since_s for each in waiting) if waiting else 0.0,
            in_flight=in_flight,
            soon=chances.soon,
            worth=chances.worth,
            worth_ahead=chances.worth_ahead,
            size_bytes=round(lab.models[name].weights_bytes),
        )


def _worker(now_s: float, each: GpuShare) -> PoolWorker:
    name, gpu, memory = str(each.number), str(each.gpu), round(each.memory_bytes)
    model = each.model.name if each.model else ""
    since_s = now_s - each.since_s
    if each.goal is not None:
        return PoolWorker(
            name, WorkerStage.LOADING, each.goal.name, 0.0, 1.0, can_take=False, gpu=gpu, memory_bytes=memory
        )
    if each.ready_s:
        left_s = max(each.ready_s - now_s, 0.0)
        return PoolWorker(
            name, WorkerStage.LOADING, model, since_s, left_s, can_take=False, gpu=gpu, memory_bytes=memory
        )
    stage = WorkerStage.SERVING if model else WorkerStage.EMPTY
    return PoolWorker(name, stage, model, since_s, gpu=gpu, memory_bytes=memory)


class OneEach:
    """A rule that gives each GPU one model for good; models beyond the number of GPUs are never served."""

    period_s = 3_600.0

    def __init__(self) -> None:
        self._done = False

    def decide(self, now_s: float, lab: ModelsLab) -> Sequence[tuple[GpuShare, AegaeonModel]]:
        """Return every assignment on the first call, and nothing later."""
        if self._done or now_s > 0:
            return []
        self._done = True
        return list(zip(lab.places, lab.models.values(), strict=False))


class BetweenRequests:
    """A rule that switches a GPU once its requests have ended, to the model that has waited longest.

    Of several such GPUs, the one idle longest switches. Requests join a GPU that runs their model. This is the way
    of ServerlessLLM with all weights in host memory.
    """

    period_s = PERIOD_S

    def decide(self, now_s: float, lab: ModelsLab) -> Sequence[tuple[GpuShare, AegaeonModel]]:
        """Return switches for the waiting models, as far as there are idle GPUs."""
        coming = {each.model.name for each in lab.places if each.model is not None and each.ready_s}
        waiting = [name for name, found in lab.waiting.items() if found and name not in coming]
        waiting.sort(key=lambda name: lab.waiting[name][0].waits_since_s)
        idle = [each for each in lab.places if not each.is_busy and not each.ready_s and each.goal is None]
        idle.sort(key=lambda each: (each.model is not None, each.since_s, each.number))
        return [(each, lab.models[name]) for each, name in zip(idle, waiting, strict=False)]
