"""Lookup of step-time profiles by model and device."""

import re
from dataclasses import dataclass

from libs.contracts.errors import InvalidRequest, StartupError
from libs.perfmodel.profiles import PROFILES, Profile, profile, shipped_entries

_TP = re.compile(r"-tp(\d+)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A profile together with whatever was measured of a running suite."""

    profile: Profile
    mixed_measured: bool
    """Whether the joint cost of prompts and decodes was measured; otherwise `interference` is an assumption."""
    chunk_tokens: int = 0
    """The most prompt tokens in a step; 0 for the smallest chunk that saturates the device."""
    hop_ms: float | None = None
    link_gbps: float | None = None
    max_sequences: int | None = None
    """Measurements of a suite; None where the lab's own default applies."""


def resolve(model: str, device: str, tp: int = 0) -> Hardware:
    """Return the profile of a model on a device, `tp` GPUs wide (0 for the only width available).

    Raises InvalidRequest, which lists the available profiles.
    """
    wanted, on = _plain(model), _plain(device)
    pairs = _pairs()
    found = [name for name, parts in pairs.items() if (_plain(parts[0]), _plain(parts[1])) == (wanted, on)]
    fits = [name for name in found if not tp or pairs[name][2] == tp]
    if len(fits) == 1 or (fits and len({pairs[name][2] for name in fits}) == 1):
        name = next((name for name in fits if name.endswith("-aic")), fits[0])
        return by_name(name)
    if found:
        widths = ", ".join(f"--tp {pairs[name][2]}" for name in found)
        raise InvalidRequest(f"{model} on {device} is there as {widths}: name one of them")
    devices = sorted({parts[1] for parts in pairs.values() if _plain(parts[0]) == wanted})
    if devices:
        raise InvalidRequest(f"there is no profile of {model} on {device}; it is there on {', '.join(devices)}")
    models = sorted({parts[0] for parts in pairs.values()})
    raise InvalidRequest(f"there is no profile of model {model!r}; there are {', '.join(models)}")


def by_name(name: str) -> Hardware:
    """Return the profile with this name; raise InvalidRequest that lists the nearest ones."""
    try:
        found = profile(name)
    except StartupError as error:
        raise InvalidRequest(error.message) from None
    return Hardware(found, bool(shipped_entries().get(name, {}).get("mixed_measured")))


def _pairs() -> dict[str, tuple[str, str, int]]:
    """Return (model, device, GPUs) by profile name, for all profiles that name a device."""
    found: dict[str, tuple[str, str, int]] = {}
    for name, entry in shipped_entries().items():
        device = str(entry["device"]).lower()
        found[name] = name[: name.index(f"-{device}")], device, int(entry["gpus"])
    for name, each in PROFILES.items():
        parts = _TP.sub("", name).rsplit("-", 1)
        if len(parts) == 2:
            found[name] = parts[0], parts[1], each.gpus
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
