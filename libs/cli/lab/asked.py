"""The options of `fulcrum lab`, turned into an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.cluster.run import PlannedLoss
from libs.lab.cluster.wrong import Wrong
from libs.lab.experiment import HOP_MS, LINK_GBPS, MAX_SEQUENCES, Experiment
from libs.lab.hardware import resolve
from libs.lab.profile_file import profile_named
from libs.lab.slo import parse_slo
from libs.lab.study import scaled
from libs.lab.traces.generate import KINDS, generate
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace
from libs.lab.traces.scaling import ScaleMethod, cut

# The largest accepted time: further than any trace goes.
MOST_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that all runs of the lab share."""

    trace: str
    workers: int
    device: str
    model: str
    tp: int
    slo: str
    rate_scale: float
    scaling: ScaleMethod
    start_s: float
    seconds: float
    seed: int
    interference: float
    profile: str = ""
    """The file or name of a profile, in place of model, device and tp."""
    closed_loop: bool = False
    losses: Sequence[str] = ()
    """Losses of workers, each written as AT:WORKER:BACK in seconds."""
    wrong: Sequence[str] = ()
    allowed_tokens: int = 0

    def experiment(self) -> Experiment:
        """Return the experiment. Raises InvalidRequest that says what to do about an option that cannot be run."""
        hardware = profile_named(self.profile) if self.profile else resolve(self.model, self.device, self.tp)
        slo = parse_slo(self.slo)
        experiment = Experiment(
            trace=trace_of(self.trace, self.start_s, self.seconds, self.seed),
            hardware=hardware,
            workers=self.workers,
            slo=slo,
            seed=self.seed,
            interference=None if self.interference < 0 else self.interference,
            link_gbps=LINK_GBPS if hardware.link_gbps is None else hardware.link_gbps / hardware.profile.gpus,
            hop_ms=HOP_MS if hardware.hop_ms is None else hardware.hop_ms,
            max_sequences=hardware.max_sequences or MAX_SEQUENCES,
            chunk_tokens=hardware.chunk_tokens,
            closed_loop=self.closed_loop,
            losses=tuple(map(parse_loss, self.losses)),
            wrong=parse_wrong(self.wrong),
            allowed_tokens=self.allowed_tokens,
        )
        return scaled(experiment, self.rate_scale, self.scaling)


def parse_loss(text: str) -> PlannedLoss:
    """Return the loss of `120:3:60`: worker 3 dies at 120 s and is back 60 s later. Raises InvalidRequest."""
    parts = text.split(":")
    try:
        at_s, worker, back_after_s = float(parts[0]), int(parts[1]), float(parts[2])
        sane = len(parts) == 3 and 0 <= at_s <= MOST_S and worker >= 0 and 0 < back_after_s <= MOST_S
    except (ValueError, IndexError):
        sane = False
    if not sane:
        raise InvalidRequest(
            f"{text!r} is no loss such as 120:3:60, by which worker 3 dies at 120 s and is back 60 s later"
        )
    return PlannedLoss(at_s, worker, back_after_s)


def parse_wrong(texts: Sequence[str]) -> Wrong:
    """Return the errors of `telemetry=500`, `steps=0.2`, `slow=3:2`, `hints=0.05`, combined. Raises InvalidRequest."""
    found = Wrong()
    for text in texts:
        try:
            found = _also_wrong(found, *text.split("=", 1))
        except (TypeError, ValueError):
            raise InvalidRequest(
                f"{text!r} is nothing to be wrong about: telemetry=500 (ms older), steps=0.2 (share by which step times"
                " are off), slow=3:2 (worker 3 takes twice as long as it says), hints=0.05 (share of false ones)"
            ) from None
    return found


def _also_wrong(found: Wrong, name: str, value: str) -> Wrong:
    """Return the errors with one more added. Raises ValueError."""
    match name:
        case "telemetry":
            return replace(found, telemetry_ms=_between(value, 0.0, 60_000.0))
        case "steps":
            return replace(found, step_times=_between(value, 0.0, 0.9))
        case "hints":
            return replace(found, hints=_between(value, 0.0, 1.0))
        case "slow":
            worker, _, times = value.partition(":")
            return replace(found, slow={**found.slow, int(worker): _between(times, 0.1, 100.0)})
    raise ValueError(name)


def _between(text: str, least: float, most: float) -> float:
    value = float(text)
    if not least <= value <= most:
        raise ValueError(text)
    return value


def trace_of(text: str, start_s: float, seconds: float, seed: int) -> Trace:
    """Return the trace of the file with this name, else the made trace that the text describes."""
    path = Path(text)
    if path.exists():
        return read_trace(path, seed=seed, start_s=start_s, seconds=seconds or None)
    kind = text.partition(":")[0]
    if kind not in KINDS:
        raise InvalidRequest(
            f"there is no file {text!r}, and {kind!r} is no kind of trace that can be made; "
            f"kinds are {', '.join(KINDS)}: see `fulcrum lab traces`"
        )
    made = generate(text, seed=seed)
    return cut(made, start_s, seconds or float("inf")) if start_s or seconds else made
