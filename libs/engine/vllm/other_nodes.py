"""The part of another node in an engine that spans several: processes that compute what node 0's scheduler decides."""

import asyncio
import contextlib
import threading

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.port import EngineIdentity
from libs.engine.vllm.core import as_startup_error, import_launch
from libs.runtime.net.ports import end_when_vanished

LEADER_DEAD = "node 0 has ended: start its worker and this one again"
DEAD = "the processes that compute here have ended, and their log says why: start node 0's worker and this one again"
# Interval between attempts to connect to node 0.
KNOCK_S = 0.5
# A node 0 without any network traffic for this long has ended.
VANISHED_S = 10


async def follow(config: EngineConfig, identity: EngineIdentity, stopping: asyncio.Event) -> None:
    """Compute until `stopping` is set. Raise StartupError if that fails, or if node 0, which schedules, ends."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not over.done():
            over.set_exception(error) if error else over.set_result(None)

    def own() -> None:
        # This thread lives as long as the processes, since Linux ends them with the thread that started them.
        error: BaseException | None = None
        try:
            import_launch().follow(config, identity)
        except BaseException as failure:
            error = as_startup_error(failure)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
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
    """Hold a connection to node 0's rendezvous until node 0 closes it by ending."""
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
