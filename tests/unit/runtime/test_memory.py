"""Tests of the return of freed memory to the system."""

from libs.runtime.linux import LOOK_S, MOST_PAUSE_S, MemoryReturns

MIB = 2**20


def test_memory_of_a_burst_is_returned_and_a_process_of_constant_size_is_left_alone() -> None:
    attempts = MemoryReturns()
    assert not attempts.due(115 * MIB, 0)
    assert attempts.due(244 * MIB, LOOK_S)
    attempts.made(244 * MIB, 118 * MIB, LOOK_S)
    assert not any(attempts.due(118 * MIB, LOOK_S * number) for number in range(2, 1000))


def test_memory_in_use_is_trimmed_ever_more_rarely_and_after_a_new_burst_at_once() -> None:
    attempts, now_s, made = MemoryReturns(), 0.0, 0
    attempts.due(100 * MIB, now_s)
    while now_s < 20 * MOST_PAUSE_S:
        now_s += LOOK_S
        if attempts.due(200 * MIB, now_s):
            attempts.made(200 * MIB, 200 * MIB, now_s)
            made += 1
    assert 20 <= made <= 25
    assert attempts.due(300 * MIB, now_s + LOOK_S)
