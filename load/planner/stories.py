"""Stories in which the mix of work turns: made traces, and when they turn to which phase."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Story:
    """A made trace, and when its mix turns to which phase."""

    spec: str
    turns: Sequence[tuple[float, str]]
    """(s from its beginning, prefill or decode)"""
    burst: tuple[int, int] = (0, 0)
    """(prompts, tokens of each) that come at each turn."""


def flipflop(rate: float, seconds: int, period: int) -> Story:
    """Prefill-heavy and decode-heavy in turns."""
    spec = f"flipflop:rate={rate},isl=1200,osl=150,spread=0.3,seconds={seconds},period={period},swing=4"
    halves = [(each, "decode" if number % 2 else "prefill") for number, each in enumerate(_range(period / 2, seconds))]
    return Story(spec, [turn for turn in halves if turn[0]])


def flood(rate: float, seconds: int) -> Story:
    """A chat, flooded with long prompts from the middle on for a quarter of the time."""
    spec = (
        f"chat-flood:rate={rate},isl=500,osl=100,spread=0.25,seconds={seconds},"
        f"flood_rate={rate * 2},flood_isl=5000,flood_at=0.4,flood_seconds={seconds // 4}"
    )
    return Story(spec, [(seconds * 0.4, "prefill")])


def bursts(seconds: int, every_s: int = 10, prompts: int = 40, tokens: int = 4_000, rate: float = 4) -> Story:
    """A chat, into which `prompts` long prompts fall within a tenth of a second, again and again."""
    at_s = [float(each) for each in range(every_s // 2, seconds - 2, every_s)]
    return Story(
        f"poisson:rate={rate:g},isl=500,osl=100,spread=0.25,seconds={seconds}",
        [(each, "prefill") for each in at_s],
        burst=(prompts, tokens),
    )


def steady(rate: float, seconds: int) -> Story:
    """Nothing turns: whatever moves here is for nothing."""
    return Story(f"poisson:rate={rate},isl=2000,osl=150,spread=0.4,seconds={seconds}", [])


def torch_bursts(seconds: int) -> Story:
    """Sized for four workers of a tiny model on two cores: bursts of prompts, each of a few steps."""
    at_s = [float(each) for each in range(5, seconds - 2, 10)]
    return Story(
        f"poisson:rate=3,isl=120,osl=24,spread=0.25,seconds={seconds}",
        [(each, "prefill") for each in at_s],
        burst=(24, 1_500),
    )


SIZED_FOR: Final = 16
"""Workers that a story of size 1 suits."""
STORIES: Final[Mapping[str, Callable[[int, float], Story]]] = {
    "flipflop": lambda seconds, size: flipflop(7 * size, seconds, 10),
    "flood": lambda seconds, size: flood(5 * size, seconds),
    "bursts": lambda seconds, size: bursts(seconds, rate=4 * size, prompts=round(40 * size)),
    "steady": lambda seconds, size: steady(8 * size, seconds),
}
"""Each takes the seconds that it lasts and its size: 1 suits `SIZED_FOR` workers, 2 suits twice as many."""
MOST_TOKENS: Final = 8_192
"""Of the simulated model's context: what is longer is left out."""
BURST_S: Final = 0.1


def made(story: Story, seed: int) -> Trace:
    """The requests of a story, in order of arrival. None has a class: clients of live suites name none, and the lab
    would take turns between those that a made trace has."""
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
