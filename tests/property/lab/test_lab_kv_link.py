"""Test that a shared link of the lab delivers each block as if turns were taken one by one."""

from dataclasses import dataclass
from typing import Any, cast

from hypothesis import assume, given
from hypothesis import strategies as st

from libs.lab.cluster.host.fetching import ReceivingLink, Stream
from libs.lab.cluster.time import START_PS, VirtualTime

BLOCK_PS = 1000


@dataclass
class HandleBlocks:
    """Blocks at their source."""

    ready: int = 0


drawn = st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=14)
"""(time, stream, blocks that become ready)."""
drops = st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 3)), max_size=2)


def one_by_one(
    ready: list[tuple[int, int, int]], dropped: dict[int, int], *, ends_first: bool
) -> list[tuple[int, int]]:
    """Return (time, stream) of each end, by a scan of every picosecond.

    `ends_first` is the order of what happens in the same picosecond.
    """
    queue: list[int] = []
    left: dict[int, int] = {}
    ends, since = list[tuple[int, int]](), 0

    def end_block(now: int) -> None:
        nonlocal since
        if queue and now - since == BLOCK_PS:
            stream, since = queue.pop(0), now
            left[stream] -= 1
            if left[stream]:
                queue.append(stream)
            else:
                ends.append((now, stream))

    for now in range(9_001 + BLOCK_PS * (1 + sum(blocks for _, _, blocks in ready))):
        if ends_first:
            end_block(now)
        for stream in [each for each, at in dropped.items() if at == now and each in queue]:
            since = now if queue[0] == stream else since
            queue.remove(stream)
        for _, stream, blocks in [each for each in ready if each[0] == now]:
            if dropped.get(stream, 10**9) <= now:
                continue
            since = since if queue else now
            if stream not in queue:
                queue.append(stream)
                left[stream] = 0
            left[stream] += blocks
        if not ends_first:
            end_block(now)
    return ends


@given(drawn, drops)
def test_ends_are_those_of_turns_taken_one_by_one(ready: list[tuple[int, int, int]], gone: list[Any]) -> None:
    ready = sorted({(at * 2 + 1, stream): blocks for at, stream, blocks in ready}.items())  # type: ignore[assignment]
    steps = [(at, stream, blocks) for (at, stream), blocks in cast(Any, ready) if at < 9_000]
    dropped = {stream: at * 2 + 1 for at, stream in gone if at * 2 + 1 < 9_000}
    expected = one_by_one(steps, dropped, ends_first=True)
    assume(expected == one_by_one(steps, dropped, ends_first=False))
    time, ends = VirtualTime(), list[tuple[int, int]]()
    link = ReceivingLink(time, BLOCK_PS, lambda stream: ends.append((time.now_ps - START_PS, names[stream])))
    streams = [Stream(cast(Any, None), cast(Any, HandleBlocks()), 0, 0) for _ in range(4)]
    names = {stream: place for place, stream in enumerate(streams)}

    def pull(place: int, blocks: int) -> None:
        if dropped.get(place, 10**9) > time.now_ps - START_PS:
            cast(Any, streams[place].held).ready += blocks
            link.pull(streams[place])

    for place, at in dropped.items():
        time.at_ps(START_PS + at, lambda place=place: link.drop(streams[place]))
    for at, place, blocks in steps:
        time.at_ps(START_PS + at, lambda place=place, blocks=blocks: pull(place, blocks))
    time.run(lambda: True)
    assert ends == expected
    assert not link.moving
