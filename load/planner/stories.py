"""Stories: synthetic traces in which the mix of work changes, with the times of these turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Story:
    """A synthetic trace, with the times at which its mix changes and the phase that it then needs more."""

    spec: str
    turns: Sequence[tuple[float, str]]
    """(seconds from the start, "prefill" or "decode") of each turn."""
    burst: tuple[int, int] = (0, 0)
    """(number of prompts, tokens of each) that arrive at each turn."""


def flipflop(rate: float, seconds: int, period: int) -> Story:
    spec = f"flipflop:rate={rate},isl=1200,osl=150,spread=0.3,seconds={seconds},period={period},swing=4"
    halves = [(each, "decode" if number % 2 else "prefill") for number, each in enumerate(_range(period / 2, seconds))]
    return Story(spec, [turn for turn in halves if turn[0]])


def flood(rate: float, seconds: int) -> Story:
    """Return a chat with a flood of long prompts that starts after 40 % of the time and lasts for a quarter of it."""
    spec = (
        f"chat-flood:rate={rate},isl=500,osl=100,spread=0.25,seconds={seconds},"
        f"flood_rate={rate * 2},flood_isl=5000,flood_at=0.4,flood_seconds={seconds // 4}"
    )
    return Story(spec, [(seconds * 0.4, "prefill")])


def bursts(seconds: int, prompts: int = 40, rate: float = 4) -> Story:
    """Return a chat in which `prompts` long prompts arrive within a tenth of a second, again and again."""
    at_s = [float(each) for each in range(5, seconds - 2, 10)]
    return Story(
        f"poisson:rate={rate:g},isl=500,osl=100,spread=0.25,seconds={seconds}",
        [(each, "prefill") for each in at_s],
        burst=(prompts, 4_000),
    )


def steady(rate: float, seconds: int) -> Story:
    return Story(f"poisson:rate={rate},isl=2000,osl=150,spread=0.4,seconds={seconds}", [])


# The number of workers for which a story has size 1.
SIZED_FOR: Final = 16
# A function of a story's seconds and size. Size 2 suits twice as many workers as `SIZED_FOR`.
STORIES: Final[Mapping[str, Callable[[int, float], Story]]] = {
    "flipflop": lambda seconds, size: flipflop(7 * size, seconds, 10),
    "flood": lambda seconds, size: flood(5 * size, seconds),
    "bursts": lambda seconds, size: bursts(seconds, rate=4 * size, prompts=round(40 * size)),
    "steady": lambda seconds, size: steady(8 * size, seconds),
}
# Longer requests are left out. It is the context of the simulated model.
MOST_TOKENS: Final = 8_192
BURST_S: Final = 0.1


def made(story: Story, seed: int) -> Trace:
    """Return the requests of a story in order of arrival, without classes.

    Clients of live suites send no class, and the lab would alternate between the classes of a generated trace.
    """
    trace = generate(story.spec, seed=seed)
    requests = [each for each in trace.requests if each.input_tokens + each.output_tokens < MOST_TOKENS]
    count, tokens = story.burst
    for at_s, _ in story.turns if count else ():
        gap_ns = round(BURST_S * 1e9 / count)
        requests += [TraceRequest(0, round(at_s * 1e9) + number * gap_ns, tokens, 16) for number in range(count)]
    requests.sort(key=lambda each: each.arrival_ns)
    return replace(
        trace, requests=[replace(each, number=number, service_class="") for number, each in enumerate(requests)]
    )


def _range(step: float, end: float) -> list[float]:
    return [step * number for number in range(int(end / step))]
