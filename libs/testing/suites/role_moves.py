"""Requests in progress while workers change roles: each answer is compared with an undisturbed one."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from libs.contracts.errors import StaleRole
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import DescribeResponse
from libs.contracts.roles import role_from_name
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.testing.suites.suite import RunningSuite
from libs.worker.admin_client import RoleMove, WorkerAdmin

BUDGET_TOKENS = 128


GUIDES: tuple[dict[str, Any], ...] = (
    {"regex": "([a-z]{2,8} ){12,40}"},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 40}},
    {"grammar": 'root ::= (word " "){12,40}\nword ::= [aeiou] [b-d]{1,6}'},
)
"""The constraints of guided answers, all of them long."""


def request_bodies(
    model: str, kinds: int, *, prompt_tokens: int, output_tokens: int, guided: bool = False
) -> list[dict[str, Any]]:
    """Return text completions that never end early, greedy and sampled in turn, with penalties and logprobs.

    With `guided`, answers end where their guide does.
    """
    rng = random.Random(7)  # noqa: S311 - not a secret
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"temperature": 0, "frequency_penalty": 0.6, "logprobs": 2},
    )
    return [
        {
            "model": model,
            "prompt": [rng.randrange(97, 122) for _ in range(rng.randint(prompt_tokens // 2, prompt_tokens))],
            "max_tokens": rng.randint(output_tokens // 2, output_tokens),
            **({"structured_outputs": GUIDES[kind % len(GUIDES)]} if guided else {"ignore_eos": True}),
            **ways[kind % len(ways)],
        }
        for kind in range(kinds)
    ]


@dataclass
class SteadyTraffic:
    """Clients that each send one request after another."""

    http: httpx.AsyncClient
    bodies: Sequence[dict[str, Any]]
    expected: list[Any] = field(default_factory=list)
    under_way: int = 0
    answered: int = 0
    output_tokens: int = 0
    failed: list[str] = field(default_factory=list)
    """A description of each answer other than 200."""
    wrong: list[int] = field(default_factory=list)
    """The requests whose answer differed."""

    async def learn(self) -> None:
        """Record the answer to every request, one after the other, while nothing moves."""
        for body in self.bodies:
            answer = await self.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            self.expected.append(_choice(answer))

    @asynccontextmanager
    async def flowing(self, clients: int) -> AsyncIterator[None]:
        """Run `clients` clients while the context is open, then wait for their last requests."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for client in range(clients):
                group.create_task(self._client(client, stop))
            try:
                yield
            finally:
                stop.set()

    async def _client(self, client: int, stop: asyncio.Event) -> None:
        rng = random.Random(client)  # noqa: S311
        while not stop.is_set():
            kind = rng.randrange(len(self.bodies))
            self.under_way += 1
            answer = await self.http.post("/v1/completions", json=self.bodies[kind])
            self.under_way -= 1
            self.answered += 1
            if answer.status_code != 200:
                self.failed.append(answer.text)
                continue
            self.output_tokens += answer.json()["usage"]["completion_tokens"]
            if _choice(answer) != self.expected[kind]:
                self.wrong.append(kind)


def _choice(answer: httpx.Response) -> Any:
    """Return every token of the answer, without logprobs, whose last bit may depend on the rest of the batch."""
    choice = answer.json()["choices"][0]
    return choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("tokens")


@dataclass(frozen=True, slots=True)
class HeldMove:
    """One role move with its timing."""

    worker: str
    role: str
    move: RoleMove
    first_step_s: float | None
    waited_s: float
    """The time that the worker spent runnable without a core meanwhile, by `RoleChanger`'s `waited_s`."""


class RoleChanger:
    """A client of workers' admin services that never leaves a phase without a worker."""

    def __init__(
        self,
        admins: Mapping[str, WorkerAdmin],
        roles: Mapping[str, str],
        waited_s: Callable[[int], float] = lambda _worker_pid: 0.0,
    ) -> None:
        """`waited_s` returns the total time that the worker's processes have been runnable without a core."""
        self._admins = admins
        self._waited_s = waited_s
        self._roles = dict(roles)
        self._before: tuple[str, str] | None = None  # (worker, role before its move) of the last move
        self._rng = random.Random(11)  # noqa: S311
        self.moves: list[HeldMove] = []
        self.rival_rounds = 0
        self.both_won = 0
        self.none_won = 0

    async def move_one(self, *, first_step_within_s: float = 0.0) -> HeldMove:
        """Move a random worker to another role."""
        worker, role = self._rng.choice(list(self._possible()))
        moved = await self.move(worker, role, first_step_within_s=first_step_within_s)
        self.moves.append(moved)
        return moved

    async def move(self, worker: str, role: str, *, first_step_within_s: float = 0.0) -> HeldMove:
        """Move a worker to a role."""
        admin = self._admins[worker]
        described = await admin.describe()
        moved = await self._ask(admin, described, role)
        assert moved.move.assignment.epoch == described.worker.assignment.epoch + 1
        self._before = (worker, self._roles[worker])
        self._roles[worker] = role
        if first_step_within_s and role != "standby":
            return replace(moved, first_step_s=await admin.first_step_s(moved.move, within_s=first_step_within_s))
        return moved

    async def move_back(self) -> HeldMove:
        """Move the worker of the last move to its role before that."""
        assert self._before is not None, "nothing has moved yet"
        moved = await self.move(*self._before)
        self.moves.append(moved)
        return moved

    async def move_against_rival(self, rivals: Mapping[str, WorkerAdmin]) -> None:
        """Send two calls with the same epoch and different roles to a worker; each that succeeds counts as a move."""
        roles: dict[str, list[str]] = {}
        for worker, role in self._possible():
            roles.setdefault(worker, []).append(role)
        worker = self._rng.choice([worker for worker, found in roles.items() if len(found) > 1])
        admins = (self._admins[worker], rivals[worker])
        described = await admins[0].describe()
        wanted = zip(admins, self._rng.sample(roles[worker], 2), strict=True)
        answers = await asyncio.gather(
            *(self._ask(admin, described, role) for admin, role in wanted), return_exceptions=True
        )
        won = [moved for moved in answers if isinstance(moved, HeldMove)]
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, StaleRole):
                raise answer
        self.rival_rounds += 1
        self.both_won += len(won) == 2
        self.none_won += not won
        self.moves += won
        if won:
            self._roles[worker] = max(won, key=lambda moved: moved.move.assignment.epoch).role

    async def _ask(self, admin: WorkerAdmin, described: DescribeResponse, role: str) -> HeldMove:
        """Set a role, with the epoch that was read. Raise StaleRole if another call came first."""
        worker = described.worker
        waited_before_s = self._waited_s(worker.pid)
        move = await admin.set_role(
            *role_from_name(role, BUDGET_TOKENS if role == "mixed" else 0),
            expected_epoch=worker.assignment.epoch,
            incarnation=worker.incarnation,
            actor="test",
            reason="to see that nothing is lost",
            force=True,
        )
        return HeldMove(worker.id, role, move, None, self._waited_s(worker.pid) - waited_before_s)

    async def reset(self, roles: Mapping[str, str]) -> None:
        """Restore these roles."""
        for worker, role in roles.items():
            if self._roles[worker] != role:
                await self.move(worker, role)

    def _possible(self) -> list[tuple[str, str]]:
        """Return every (worker, role) that leaves a worker for prompts and one for tokens."""
        found = []
        for worker, now in self._roles.items():
            others = [role for other, role in self._roles.items() if other != worker]
            for role in ("prefill", "decode", "mixed", "standby"):
                after = [*others, role]
                prompts, tokens = "prefill" in after or "mixed" in after, "decode" in after or "mixed" in after
                if role != now and prompts and tokens:
                    found.append((worker, role))
        return found


@asynccontextmanager
async def open_admins(addresses: Mapping[str, str], token: str) -> AsyncIterator[dict[str, WorkerAdmin]]:
    """Open the admin services of workers, by id."""
    async with AsyncExitStack() as stack:
        yield {
            worker: WorkerAdmin(await stack.enter_async_context(make_channel(CommonSettings(), address)), worker, token)
            for worker, address in addresses.items()
        }


@asynccontextmanager
async def suite_admins(suite: RunningSuite) -> AsyncIterator[tuple[dict[str, str], dict[str, WorkerAdmin]]]:
    """Open the (role, admin service) of each of a suite's workers, by id."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        workers = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
    addresses = {worker["id"]: worker["address"] for worker in workers}
    async with open_admins(addresses, suite.ready["token"]) as admins:
        yield {worker["id"]: worker["role"] for worker in workers}, admins


@asynccontextmanager
async def role_changer(suite: RunningSuite) -> AsyncIterator[RoleChanger]:
    """Return a changer of a suite's roles; the initial roles are restored when the context closes."""
    async with suite_admins(suite) as (roles, admins):
        changer = RoleChanger(admins, roles)
        try:
            yield changer
        finally:
            await changer.reset(roles)
