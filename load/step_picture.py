"""Foretold against measured step times, as a picture."""

import statistics
from pathlib import Path

from libs.perfmodel.learner import StepKind
from load.step_grid import Cell

COLOURS = {StepKind.PREFILL: "tab:cyan", StepKind.DECODE: "tab:green", StepKind.MIXED: "tab:orange"}


def draw(file: Path, foretold_ns: dict[Cell, float], times: dict[Cell, list[int]]) -> None:
    """The median of each cell against what a model said that had not seen it; in grey they differ by < 10 %."""
    import matplotlib as mpl  # noqa: PLC0415 (only where a picture is asked for)

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(6, 5.4), layout="constrained")
    for kind, colour in COLOURS.items():
        cells = [cell for cell in times if cell.kind is kind]
        x = [statistics.median(times[cell]) / 1e6 for cell in cells]
        axes.scatter(x, [foretold_ns[cell] / 1e6 for cell in cells], s=26, color=colour, label=kind.value, alpha=0.7)
    edges = [statistics.median(durations) / 1e6 for durations in times.values()]
    line = [min(edges) * 0.9, max(edges) * 1.1]
    axes.plot(line, line, color="grey", linewidth=0.8)
    axes.fill_between(line, [x * 0.9 for x in line], [x * 1.1 for x in line], color="grey", alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="foretold without having seen it, ms")
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
