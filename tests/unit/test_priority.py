"""The priority of computing."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from libs.engine.torch.priority import give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priority is a process's")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("by", [0, 1])
def test_a_thread_gives_way_with_those_it_starts_and_no_others_do(by: int) -> None:
    before = nice()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(give_way, by).result()
        assert threads.submit(nice).result() == before + by
        with threads.submit(ThreadPoolExecutor, 1).result() as started:
            assert threads.submit(lambda: started.submit(nice).result()).result() == before + by
    assert nice() == before
