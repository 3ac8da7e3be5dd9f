"""A small disk and a network of its own for a server under test. Both need root."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.testing.servers.server import Server
from libs.testing.servers.stores import running


class NotPermitted(Exception):
    """The kernel or the container refuses a mount or a network; the message says which."""


def _run(*words: str, purpose: str) -> None:
    """Run a command as root. Raise NotPermitted with its error."""
    if os.geteuid() != 0:
        raise NotPermitted(f"{purpose} needs root")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotPermitted(f"{purpose} needs {words[0]} on the PATH") from None
    if done.returncode:
        raise NotPermitted(f"{purpose} is refused here: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of `mib` MiB at a new folder. Raise NotPermitted."""
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder), purpose="a mount of a small tmpfs")
    try:
        yield folder
    finally:
        # A failure must not hide the test's own, nor stop other clean-up. A tmpfs outlives a SIGKILL of the test.
        done = subprocess.run(("umount", "-l", str(folder)), capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"warning: {done.stderr.strip()}; run `umount -l {folder}`", file=sys.stderr)


def fill(path: Path) -> None:
    """Write to a new file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


# An address block for tests of network devices (RFC 2544), which nothing on the Internet uses.
_NET: Final = "198.18.{net}.{host}"
_PURPOSE: Final = "a network namespace"


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """A network namespace with one address, which a switch joins to its peers and to this machine."""

    address: str
    enter: tuple[str, ...]
    """The words before a command that run it there."""
    switch: tuple[str, ...]
    """The words before a command that run it at the switch."""
    port: str
    """The switch's end of the host's cable."""

    def unplug(self) -> None:
        """Drop everything from and to it. No end of any connection arrives."""
        _ip(self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Undo `unplug`."""
        _ip(self.switch, "link", "set", self.port, "up")

    def refuse(self, addresses: Sequence[str]) -> None:
        """Drop what it sends to these addresses, answers included."""
        for each in addresses:
            _ip(self.enter, "route", "add", "blackhole", f"{each}/32")

    def accept(self, addresses: Sequence[str]) -> None:
        """Undo `refuse`."""
        for each in addresses:
            _ip(self.enter, "route", "del", "blackhole", f"{each}/32")


@dataclass(frozen=True, slots=True)
class SwitchedNetwork:
    """Hosts behind one switch, to which this machine is joined too."""

    address: str
    """This machine's own address."""
    hosts: list[NetworkHost]


@contextlib.contextmanager
def switched_network(count: int) -> Iterator[SwitchedNetwork]:
    """Join `count` hosts by a switch. Raise NotPermitted."""
    # The uplink's name and the addresses are this process's own, so that two tests may run at a time.
    net, uplink = os.getpid() % 256, f"fulcrum{os.getpid()}"
    network = SwitchedNetwork(_NET.format(net=net, host=254), [])
    with contextlib.ExitStack() as stack:
        # In a namespace of its own the switch is not subject to this machine's rules for forwarding, such as Docker's.
        switch, switch_pid = _namespace(stack)
        _ip(switch, "link", "add", "bridge", "type", "bridge")
        _ip(switch, "link", "set", "bridge", "up")
        _ip((), "link", "add", uplink, "type", "veth", "peer", "name", "uplink", "netns", switch_pid)
        _ip(switch, "link", "set", "uplink", "master", "bridge", "up")
        _ip((), "address", "add", f"{network.address}/24", "dev", uplink)
        _ip((), "link", "set", uplink, "up")
        for number in range(1, count + 1):
            enter, pid = _namespace(stack)
            host = NetworkHost(_NET.format(net=net, host=number), enter, switch, f"port{number}")
            _ip(switch, "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            _ip(switch, "link", "set", host.port, "master", "bridge", "up")
            _ip(enter, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip(enter, "link", "set", device, "up")
            network.hosts.append(host)
        yield network


def _ip(enter: Sequence[str], *words: str) -> None:
    _run(*enter, "ip", *words, purpose=_PURPOSE)


def _namespace(stack: contextlib.ExitStack) -> tuple[tuple[str, ...], str]:
    """Return the words that enter a new namespace, and the id of the process that holds it.

    The namespace ends with this process, even by SIGKILL.
    """
    _run("unshare", "--net", "true", purpose=_PURPOSE)
    own = Path("/proc/self/ns/net").readlink()
    holder = Server(
        "a network namespace",
        ("unshare", "--net", "sleep", "infinity"),
        log=Path(os.devnull),
        ready=lambda pid: Path(f"/proc/{pid}/ns/net").readlink() != own,
    )
    pid = str(stack.enter_context(running(holder)).pid)
    return ("nsenter", "--target", pid, "--net"), pid
