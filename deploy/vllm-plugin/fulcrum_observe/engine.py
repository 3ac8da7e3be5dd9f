"""The hooks in vLLM's engine process: its scheduler's decisions, outputs and dummy steps."""

import functools
import logging
import os
import socket
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from . import URL_VARIABLE
from .recorder import StepRecorder
from .reporter import make_reporter
from .wire import ROLE_MIXED, ROLE_PREFILL, Load, Source, Step

NAME_VARIABLE = "FULCRUM_OBSERVE_NAME"
ROLE_VARIABLE = "FULCRUM_OBSERVE_ROLE"
TOKEN_VARIABLE = "FULCRUM_OBSERVE_TOKEN"
ENGINE = "vllm (plugin)"
PRODUCER = "kv_producer"
CONSUMER = "kv_consumer"
AWAITING_KV = "WAITING_FOR_REMOTE_KVS"
LOAD_EVERY_NS = 100_000_000
MAX_COUNTED = 1_000
"""The maximum number of waiting prompts whose tokens are added up one by one."""
PATCHED = "_fulcrum_observe"

log = logging.getLogger("vllm")


class Clock:
    """A clock of Unix nanoseconds that never goes backwards within a process."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self) -> int:
        return time.monotonic_ns() + self._offset_ns


def patch() -> None:
    """Make every engine loop of this process report its steps. Idempotent."""
    from vllm.v1.engine import core  # noqa: PLC0415 - vLLM exists only where it is installed

    for kind in (core.EngineCoreProc, core.DPEngineCoreProc):
        if "run_busy_loop" in vars(kind) and PATCHED not in vars(kind):
            kind.run_busy_loop = _reporting(kind.run_busy_loop)
            setattr(kind, PATCHED, True)


def _reporting(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(run)
    def loop(self: Any) -> Any:
        stop: Callable[[], None] | None = None
        try:
            stop = attach(self)
        except Exception:  # vLLM must serve in any case
            log.warning("fulcrum-observe does not report: unknown vLLM", exc_info=True)
        try:
            return run(self)
        finally:
            if stop is not None:
                stop()

    return loop


def attach(core: Any) -> Callable[[], None]:
    """Report the steps of an EngineCore from now on, and return a function that stops the reports."""
    clock = Clock()
    recorder = StepRecorder(clock)
    source = source_of(core.vllm_config, clock())
    stop = make_reporter(recorder, source, os.environ[URL_VARIABLE], os.environ.get(TOKEN_VARIABLE, ""))
    follow(core.scheduler, recorder, clock)
    run_dummy = core.execute_dummy_batch

    @functools.wraps(run_dummy)
    def dummy() -> Any:
        start_ns = clock()
        try:
            return run_dummy()
        finally:
            recorder.dummy(start_ns, clock())

    core.execute_dummy_batch = dummy
    log.info("fulcrum-observe: %s reports its steps to %s", source.name, os.environ[URL_VARIABLE])
    return stop


def follow(scheduler: Any, recorder: StepRecorder, clock: Callable[[], int]) -> None:
    """Record the decisions of a scheduler and the ends of its steps."""
    schedule, update = scheduler.schedule, scheduler.update_from_output
    hooks = SchedulerHooks(scheduler, recorder, clock)

    @functools.wraps(schedule)
    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        hooks.run(hooks.decided, output)
        return output

    @functools.wraps(update)
    def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.run(hooks.ended, output)
        try:
            return update(output, *args, **kwargs)
        finally:
            hooks.run(hooks.updated, output)

    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


class SchedulerHooks:
    """The hooks of one scheduler. Recording ends with the first error in them."""

    def __init__(self, scheduler: Any, recorder: StepRecorder, clock: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._recorder = recorder
        self._clock = clock
        self._counted_ns = 0
        self._broken = False

    def run(self, hook: Callable[[Any], None], output: Any) -> None:
        if self._broken:
            return
        try:
            hook(output)
        except Exception:  # an unknown scheduler must not stop the engine
            self._broken = True
            self._recorder.broken = True
            log.warning("fulcrum-observe does not report any more: unknown scheduler", exc_info=True)

    def decided(self, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            self._recorder.decided(self._work(output.num_scheduled_tokens))
        else:
            self._recorder.nothing_to_compute(bool(self._awaiting_kv()))

    def ended(self, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            self._recorder.ended()

    def updated(self, _output: Any) -> None:
        now_ns = self._clock()
        if not self._scheduler.running or now_ns >= self._counted_ns + LOAD_EVERY_NS:
            self._counted_ns = now_ns
            self._recorder.load = self._load()

    def _work(self, scheduled: dict[str, int]) -> Step:
        """Return the work of a step whose tokens vLLM already counts as computed.

        A single last token costs as much as a decode and counts as one. This includes the last prompt token of a
        transferred prompt, which is computed again to sample from it.
        """
        tokens = prompts = context = squared = decodes = kv_tokens = 0
        requests = self._scheduler.requests
        for request_id, count in scheduled.items():
            request = requests[request_id]
            end = request.num_computed_tokens
            start = end - count
            if start > 0 and start >= request.num_tokens - 1:
                decodes += 1
                kv_tokens += end
            else:
                tokens += count
                prompts += 1
                context += end
                squared += end * end - start * start
        return Step(0, 0, tokens, prompts, context, decodes, kv_tokens, squared)

    def _awaiting_kv(self) -> int:
        held = getattr(self._scheduler, "kv_holding_waiting", None)
        queue = self._scheduler.waiting if held is None else held
        return sum(each.status.name == AWAITING_KV for each in _first(queue))

    def _load(self) -> Load:
        scheduler = self._scheduler
        running, waiting = scheduler.running, scheduler.waiting
        prompts = [each for each in _first(waiting) if each.status.name != AWAITING_KV]
        tokens = sum(max(each.num_tokens - each.num_computed_tokens, 0) for each in (*prompts, *running))
        # Each running sequence has one token left to compute, which belongs to no prompt.
        tokens -= sum(each.num_tokens - each.num_computed_tokens == 1 for each in running)
        if len(waiting) > MAX_COUNTED:
            tokens = tokens * len(waiting) // MAX_COUNTED
        return Load(
            running=len(running),
            waiting=len(waiting),
            waiting_prefill_tokens=tokens,
            awaiting_kv=self._awaiting_kv(),
            free_kv_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )


def _first(queue: Any) -> list[Any]:
    return list(islice(queue, MAX_COUNTED))


def source_of(config: Any, incarnation: int) -> Source:
    """Return the description of an engine from vLLM's configuration and the environment."""
    parallel, cache, steps = config.parallel_config, config.cache_config, config.scheduler_config
    name = os.environ.get(NAME_VARIABLE) or socket.gethostname()
    rank = getattr(parallel, "data_parallel_index", 0) or parallel.data_parallel_rank
    ranks = max(parallel.data_parallel_size, rank + 1)
    served = config.model_config.served_model_name
    role, budget = role_of(config.kv_transfer_config, steps.max_num_batched_tokens)
    return Source(
        name=f"{name}-dp{rank}" if ranks > 1 else name,
        incarnation=incarnation,
        node=socket.gethostname(),
        gpus=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        engine=ENGINE,
        model=served[0] if isinstance(served, list) else served,
        role=role,
        budget_tokens=budget,
        kv_blocks=cache.num_gpu_blocks or 0,
        block_size_tokens=cache.block_size or 0,
        max_sequences=steps.max_num_seqs,
        chunk_tokens=steps.max_num_batched_tokens,
        group=name if ranks > 1 else "",
    )


def role_of(transfer: Any, chunk_tokens: int) -> tuple[int, int]:
    """Return the role and prompt budget from the environment, or else those that follow from the KV connector."""
    kv_role = getattr(transfer, "kv_role", None)
    usual = {PRODUCER: "prefill", CONSUMER: "decode"}.get(kv_role or "", "mixed")
    named = os.environ.get(ROLE_VARIABLE) or usual
    return {"prefill": (ROLE_PREFILL, 0), "decode": (ROLE_MIXED, 0)}.get(named, (ROLE_MIXED, chunk_tokens))
