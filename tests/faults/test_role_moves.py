"""Workers that change their roles under load: nothing is aborted, no token is lost, doubled or another."""

from contextlib import AsyncExitStack
from typing import Any

from libs.testing.role_moves import Mover, Traffic, open_admins, request_bodies
from libs.testing.wait import until
from libs.testing.worker import TOKEN, LocalWorker, local_worker

ROLES = {"a": "prefill", "b": "decode", "c": "decode", "d": "decode"}


def is_clean(worker: LocalWorker) -> bool:
    integrity = worker.host.integrity()
    return not (integrity.live_sequences or integrity.referenced_blocks or integrity.leased_handles)


async def moves_under_load(open_gateway_over: Any, moves: int, **engine: Any) -> None:
    async with AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(local_worker(name, role, max_sequences=8, **engine))
            for name, role in ROLES.items()
        }
        gateway = await stack.enter_async_context(
            open_gateway_over(*(worker.host.worker() for worker in workers.values()))
        )
        addresses = {name: worker.address for name, worker in workers.items()}
        mover = Mover(await stack.enter_async_context(open_admins(addresses, TOKEN)), ROLES)
        traffic = Traffic(gateway.http, request_bodies("sim", 12, prompt_tokens=60, output_tokens=60))
        await traffic.learn()
        async with traffic.flowing(16):
            for _ in range(moves):
                answered = traffic.answered
                await until(lambda answered=answered: traffic.answered > answered + 3, what="answers")
                await mover.move_one()
        assert (traffic.failed, traffic.wrong) == ([], [])
        caught = sum(moved.move.running > 0 for moved in mover.moves)
        assert caught >= moves // 2
        assert all(moved.move.effect_s is not None for moved in mover.moves)
        assert sum(event.moves for event in gateway.events()) > 0
        assert sum(worker.host.leaving.moved for worker in workers.values()) > 0
        await until(gateway.idle, what="an idle gateway")
        await until(lambda: all(map(is_clean, workers.values())), what="clean workers")


async def test_sim_workers_move_under_load(open_gateway_over: Any) -> None:
    await moves_under_load(open_gateway_over, 24, sim_speedup=4.0)
