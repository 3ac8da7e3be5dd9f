"""The command `fulcrum models generate`: a made log of many models, as CSV."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from libs.cli.console import make_console
from libs.cli.lab.progress import noting
from libs.cli.lab.runs import rounded
from libs.lab.models.generate import KINDS, generate_usage
from libs.lab.models.read import write_usage
from libs.lab.models.usage import UsageLog, use_by_window

MINUTE_S = 60.0


def run_generate(spec: str | None, *, seed: int, out: Path | None, as_json: bool) -> None:
    """Write a log and print what is in it, or list the kinds. Raises InvalidRequest."""
    if spec is None:
        _list(as_json=as_json)
        return
    with noting() as notes:
        notes.doing(f"drawing {spec}")
        log = generate_usage(spec, seed=seed)
        if out is not None:
            notes.doing(f"writing {len(log.t_s):,} requests")
            write_usage(log, out)
        found = {"spec": spec, "seed": seed, "file": str(out) if out else None, **rounded(figures(log))}
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if value is not None:
            make_console().print(Text.assemble((name.replace("_", " "), "bold"), f"  {value}"))


def figures(log: UsageLog) -> dict[str, Any]:
    """Return a log's size, the number of models in use, and how correlated they are."""
    use = use_by_window(log, MINUTE_S)
    return {
        "requests": len(log.t_s),
        "models": len(log.models),
        "seconds": log.end_s,
        "exec_mean_s": float(log.exec_s.mean()),
        "gpus_total": float(log.gpus.sum()),
        "active_mean": float(use.mean_models.mean()) if len(use) else None,
        "peak_mean_gpus": float(use.peak_gpus.mean()) if len(use) else None,
        "pairwise_correlation": pairwise_correlation(log),
    }


def pairwise_correlation(log: UsageLog) -> float | None:
    """Return the mean correlation of requests per minute over pairs of models."""
    minutes, models = int(log.end_s / MINUTE_S), len(log.models)
    if minutes < 2 or models < 2:
        return None
    counts = np.zeros((minutes, models))
    inside = log.t_s < minutes * MINUTE_S
    np.add.at(counts, ((log.t_s[inside] / MINUTE_S).astype(np.int64), log.model[inside]), 1.0)
    counts = counts[:, counts.std(axis=0) > 0]
    if counts.shape[1] < 2:
        return None
    scaled = (counts - counts.mean(axis=0)) / counts.std(axis=0)
    total = float((scaled.sum(axis=1) ** 2).mean())
    return (total / counts.shape[1] - 1) / (counts.shape[1] - 1)


def _list(*, as_json: bool) -> None:
    if as_json:
        kinds = {
            name: {each.name: {"default": each.default, "meaning": each.says} for each in parameters}
            for name, parameters in KINDS.items()
        }
        print(json.dumps({"kinds": kinds}))
        return
    console = make_console()
    console.print(Text.assemble(("Kinds", "bold"), ", e.g. gamma:models=100,cv=4,seconds=86400:"))
    for name, parameters in KINDS.items():
        named = ", ".join(f"{each.name}={each.default:g}" for each in parameters)
        console.print(Text.assemble(f"  {name}: ", (named, "dim")))
