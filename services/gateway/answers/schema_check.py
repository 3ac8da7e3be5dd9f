"""Whether JSON schemas can be kept to, found out in a process that can be ended, and remembered."""

import asyncio
import signal
import sys
from collections import OrderedDict

from libs.contracts.errors import QueueFull
from libs.dispatch.fair_slots import FairSlots
from libs.dispatch.ports import Tenancy
from libs.dispatch.waiting import RETRY_AFTER_S
from libs.model.grammar import MAX_CPU_S, MAX_MEMORY_BYTES

MAX_CHECKED = 256
"""Schemas whose verdict is remembered."""
MAX_CHECKS = 2
"""At a time."""
MAX_WAITING = 32
"""Schemas that wait for it; more are refused with 429."""
MAX_CHECK_S = 20.0
"""By the clock, on a machine that has other things to do: no verdict then, but 429."""
_OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
MAX_REASON_CHARS = 300


class SchemaCheck:
    """Verdicts by schema."""

    def __init__(self, tenants: Tenancy | None = None) -> None:
        """tenants: who share the checks; None: all requests are alike."""
        self._faults: OrderedDict[str, str] = OrderedDict()
        full = f"{MAX_CHECKS} schemas are checked at a time, and too many wait: others need room too"
        self.slots = FairSlots(MAX_CHECKS, MAX_WAITING, full, tenants=tenants)
        self._checks: dict[tuple[str, str], asyncio.Lock] = {}
        """By tenant and schema, of those that are checked or wait for it."""

    async def fault(self, schema: str, tenant: str = "") -> str:
        """Why a schema, as JSON, cannot be kept to; empty where it can. Raises QueueFull where too many are checked."""
        found = self._faults.get(schema)
        if found is None:
            found = await self._check(schema, tenant)
        else:
            self._faults.move_to_end(schema)
        return found

    async def _check(self, schema: str, tenant: str) -> str:
        """Once, however many of the tenant's requests wait for it."""
        async with self._checks.setdefault((tenant, schema), asyncio.Lock()):
            found = self._faults.get(schema)
            if found is not None:
                return found
            try:
                async with self.slots.slot(tenant):
                    found = self._faults[schema] = await _ask(schema)
            finally:
                self._checks.pop((tenant, schema), None)
        while len(self._faults) > MAX_CHECKED:
            self._faults.popitem(last=False)
        return found


async def _ask(schema: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "libs.model.grammar"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(MAX_CHECK_S):
            said, _ = await child.communicate(schema.encode())
    except TimeoutError:
        raise QueueFull("the schema could not be checked in time", retry_after_s=RETRY_AFTER_S) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode in _OUT_OF_TIME:
        return f"it takes more than {MAX_CPU_S} s to compile"
    if child.returncode is None or child.returncode > 0:
        raise RuntimeError(f"the check of a schema ended with {child.returncode}")
    if child.returncode:
        return f"it takes more than {MAX_MEMORY_BYTES} bytes to compile"
    return said.decode()[:MAX_REASON_CHARS]
