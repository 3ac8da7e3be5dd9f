import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name(info: Path = CPU_INFO) -> str:
    """Return the CPU model that Linux reports, or else the architecture."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, "").split()) or platform.machine()
