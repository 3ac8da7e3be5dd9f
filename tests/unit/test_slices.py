"""What a thread asks the kernel for."""

import platform
import threading

import pytest

from libs.runtime import slices
from libs.runtime.slices import COMPUTE_SLICE_NS, LOOP_SLICE_NS, ask_slice


def in_a_thread(slice_ns: int) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask_slice(slice_ns)))
    thread.start()
    thread.join()
    return answers[0]


def test_linux_takes_a_slice_from_any_thread() -> None:
    if platform.system() != "Linux":
        pytest.skip("only Linux has slices")
    assert in_a_thread(LOOP_SLICE_NS) and in_a_thread(COMPUTE_SLICE_NS)


def test_where_there_are_no_slices_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.platform, "machine", lambda: "another")
    assert not in_a_thread(LOOP_SLICE_NS)
    monkeypatch.setattr(slices.platform, "system", lambda: "Darwin")
    assert not in_a_thread(LOOP_SLICE_NS)
