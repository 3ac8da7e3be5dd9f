"""Tests of a suite's children: started, watched, restarted under their names, and stopped."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from libs.contracts.errors import StartupError
from libs.launch.processes.local import GRPC_EXPERIMENTS, ProcessLauncher
from libs.launch.processes.port import ChildSpec
from libs.launch.processes.supervisor import Supervisor
from libs.launch.ready import Ready, read_ready, write_ready
from libs.launch.up import MAX_SOCKET_BYTES, check_socket_path, run_helper, suite_folder
from libs.runtime.tasks import TaskOwner

pytestmark = pytest.mark.system

READY = "import json, os, sys, time; print(json.dumps({'event': 'ready', 'grpc': str(os.getpid())}), flush=True);"
FOREVER = READY + "time.sleep(60)"
TIMEOUT_S = 20


def child(code: str, **options: str) -> ChildSpec:
    return ChildSpec("child-1", ("python", "-c", code), {"WORD": "told"}, **options)


class RecordedOutput:
    """A reporter that records its messages."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.notes: list[str] = []
        self.changed = asyncio.Event()

    def progress(self, name: str, stage: str, fraction: float) -> None: ...

    def ready(self, name: str, address: str) -> None:
        self.addresses.append(address)
        self.changed.set()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.changed.set()

    async def starts(self, count: int) -> None:
        """Wait until the child was ready that often."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.addresses) < count:
                self.changed.clear()
                await self.changed.wait()


class Kept:
    """A supervised child and what became of it."""

    def __init__(self, launcher: ProcessLauncher, tasks: TaskOwner) -> None:
        self.launcher, self.tasks, self.output = launcher, tasks, RecordedOutput()
        self.deaths: list[StartupError] = []

    def start(self, spec: ChildSpec, *, restart: bool = True) -> Supervisor:
        self.supervisor = Supervisor(self.launcher, spec, self.output, restart=restart, on_death=self.deaths.append)
        self.supervisor.start(self.tasks)
        return self.supervisor


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    tasks = TaskOwner()
    found = Kept(ProcessLauncher(tmp_path / "logs"), tasks)
    yield found
    await found.supervisor.stop(0.0)
    await tasks.close()
    assert tasks.error is None


async def gone(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        async with asyncio.timeout(TIMEOUT_S):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)


async def test_a_killed_child_is_restarted_under_its_name(kept: Kept) -> None:
    kept.start(child(FOREVER))
    await kept.output.starts(1)
    os.kill(int(kept.output.addresses[0]), signal.SIGKILL)
    await kept.output.starts(2)
    assert kept.output.addresses[0] != kept.output.addresses[1]
    assert "child-1 died (signal SIGKILL" in kept.output.notes[0]


async def test_a_child_killed_by_its_suite_is_not_restarted(kept: Kept) -> None:
    supervisor = kept.start(child(FOREVER))
    await kept.output.starts(1)
    supervisor.kill()
    await gone(int(kept.output.addresses[0]))
    async with asyncio.timeout(TIMEOUT_S):
        while len(kept.tasks):
            await asyncio.sleep(0.01)
    assert kept.output.notes == []


async def test_waits_between_restarts_grow(kept: Kept) -> None:
    kept.start(child(READY))
    await kept.output.starts(3)
    first_s, second_s = (float(note.rpartition(" in ")[2].removesuffix(" s")) for note in kept.output.notes[:2])
    assert 0.12 <= first_s <= 0.25 <= second_s <= 0.5


async def test_without_restart_a_death_is_reported_once(kept: Kept) -> None:
    kept.start(child(READY + "sys.exit('out of luck')"), restart=False)
    async with asyncio.timeout(TIMEOUT_S):
        while not kept.deaths:
            await asyncio.sleep(0.01)
    assert "exit code 1: out of luck" in kept.deaths[0].message
    assert len(kept.output.addresses) == 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('no such luck')", "exit code 1: no such luck; log: "),
        ('import sys; print(\'{"event": "failed", "error": "port taken"}\'); sys.exit(2)', "port taken"),
        ("pass", "exit code 0"),
    ],
)
async def test_a_child_that_is_never_ready_fails_the_start_with_its_own_message(
    kept: Kept, code: str, reason: str
) -> None:
    supervisor = kept.start(child(code))
    with pytest.raises(StartupError, match="child-1 cannot start: ") as failure:
        await asyncio.wait_for(supervisor.first_ready, TIMEOUT_S)
    assert reason in failure.value.message


async def test_a_missing_program_is_reported_as_missing(kept: Kept) -> None:
    supervisor = kept.start(ChildSpec("child-1", ("/no/such/program",), {}))
    with pytest.raises(StartupError, match="/no/such/program cannot be run: No such file"):
        await asyncio.wait_for(supervisor.first_ready, TIMEOUT_S)


async def test_a_program_without_status_lines_is_ready_by_its_output(kept: Kept) -> None:
    spec = child("import time; print('now I am open', flush=True); time.sleep(60)", ready_text="am open")
    await asyncio.wait_for(kept.start(spec).first_ready, TIMEOUT_S)
    assert kept.launcher.last_words("child-1") == "now I am open"


async def test_a_restart_reuses_the_port_of_the_first_start(kept: Kept) -> None:
    code = (
        "import json, os; port = os.environ['PORT']; "
        "print(json.dumps({'event': 'ready', 'http': f'http://h:{port if port != str(0) else 4321}'}), flush=True)"
    )
    spec = ChildSpec("child-1", ("python", "-c", code), {"PORT": "0"}, port_variable="PORT")
    kept.start(spec)
    await kept.output.starts(2)
    assert kept.output.addresses[:2] == ["http://h:4321"] * 2


async def test_a_stop_lets_a_child_drain_and_then_ends_it_and_its_children(kept: Kept) -> None:
    grandchild = (
        "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(json.dumps({'event': 'ready', 'grpc': f'{os.getpid()} {other.pid}'}), flush=True); time.sleep(60)"
    )
    supervisor = kept.start(child("import json, os, sys, time;" + grandchild))
    await kept.output.starts(1)
    pids = [int(pid) for pid in kept.output.addresses[0].split()]
    await supervisor.stop(0.1)
    for pid in pids:
        await gone(pid)


async def test_a_log_is_bounded_while_its_child_writes(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.launch.processes.local.MAX_LOG_BYTES", 20_000)
    kept.start(child(READY + "[(sys.stderr.write('x' * 999 + '\\n'), time.sleep(0.001)) for _ in iter(int, 1)]"))
    await kept.output.starts(1)
    log = Path(kept.launcher.log_of("child-1"))
    kept_aside = log.with_name("child-1.log.1")
    for _ in range(3):
        async with asyncio.timeout(TIMEOUT_S):
            while log.stat().st_size <= 20_000:
                await asyncio.sleep(0.01)
        await kept.launcher.bound_logs()
        assert log.stat().st_size < 20_000
        assert kept_aside.stat().st_size > 20_000
        kept_aside.unlink()
    assert len(kept.output.addresses) == 1  # the child noticed nothing


async def test_a_death_is_noticed_while_a_grandchild_holds_the_output_open(kept: Kept) -> None:
    code = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    kept.start(child(READY + code))
    await kept.output.starts(2)
    assert "exit code 0" in kept.output.notes[0]


async def test_a_helper_reports_its_path_or_its_reason(tmp_path: Path) -> None:
    launcher, reported = ProcessLauncher(tmp_path), RecordedOutput()
    good = 'print(\'{"event": "ready", "path": "/models/m"}\')'
    assert await run_helper(launcher, reported, "convert", ("python", "-c", good)) == "/models/m"
    with pytest.raises(StartupError, match="no room"):
        await run_helper(launcher, reported, "convert", ("python", "-c", "import sys; sys.exit('no room')"))


LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from libs.launch.up import suite_folder
from libs.launch.processes.port import ChildSpec
from libs.launch.processes.local import GRPC_EXPERIMENTS, ProcessLauncher

async def main():
    async with suite_folder() as folder:
        child = await ProcessLauncher(Path(sys.argv[1])).start(ChildSpec("c", ("python", "-c", sys.argv[2]), {}))
        async for line in child.statuses():
            print(line.grpc, folder, flush=True)

asyncio.run(main())
"""


async def test_kill_9_of_the_launcher_leaves_no_child_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), FOREVER]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid, folder = launcher.stdout.readline().split()
    assert Path(folder).is_dir()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    await gone(int(pid))
    async with asyncio.timeout(TIMEOUT_S):
        while Path(folder).exists():
            await asyncio.sleep(0.01)


async def test_folder_and_files_are_removed_with_the_context(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    async with suite_folder(file) as folder:
        file.write_text("{}")
        (folder / "sub").mkdir()
    assert not folder.exists()
    assert not file.exists()


def _ready(pid: int) -> Ready:
    return Ready(
        gateway="http://g", gateways=("http://g",), planner="http://p", metrics="http://m", pid=pid, token="t",
        kafka="k", redis="r", cluster="local", model="sim", engine="sim",
    )  # fmt: skip


def test_a_ready_file_is_private_and_readable_while_its_suite_lives(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ready.json"
    write_ready(path, _ready(os.getpid()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_ready(path) == _ready(os.getpid())
    assert list(path.parent.iterdir()) == [path]


def test_a_ready_file_of_a_dead_suite_is_ignored(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    path = tmp_path / "ready.json"
    write_ready(path, _ready(process.pid))
    assert read_ready(path) is None
    path.write_text("{")
    assert read_ready(path) is None
    assert read_ready(tmp_path / "none") is None


def test_images_set_the_same_grpc_poll_strategy_as_a_suite() -> None:
    image = Path(__file__).parents[3] / "deploy" / "images" / "Dockerfile"
    assert f"GRPC_EXPERIMENTS={GRPC_EXPERIMENTS} " in image.read_text()


def test_a_folder_whose_path_is_too_long_for_a_socket_is_refused() -> None:
    longest = "/" + "x" * (MAX_SOCKET_BYTES - len("//redis.sock"))
    check_socket_path(Path(longest))
    with pytest.raises(StartupError, match="set TMPDIR to a shorter folder"):
        check_socket_path(Path(f"{longest}x"))
