"""Coroutines that give others a turn now and then, without a loop."""

from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What it comes to when nobody else wants a turn. It must wait for nothing else."""
    while True:
        try:
            coroutine.send(None)
        except StopIteration as ended:
            result: Result = ended.value
            return result
