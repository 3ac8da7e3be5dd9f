"""What holds prompts, answers, tokens or KV is for its user alone, whatever the umask says."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from libs.engine.kv.pool_file import PoolFile
from libs.filestore.local import LocalFiles
from libs.launch.processes.local import ProcessLauncher
from libs.launch.processes.port import ChildSpec
from libs.runtime.paths import create_private, private_folder
from services.metrics.history.file import HistoryFile


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """As wide as can be: nothing may rely on it."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Of the folder and all in it, by name."""
    found = {".": folder, **{str(path.relative_to(folder)): path for path in folder.rglob("*")}}
    return {name: stat.S_IMODE(path.stat().st_mode) for name, path in found.items()}


def assert_closed(folder: Path) -> None:
    found = modes(folder)
    wrong = {name: oct(mode) for name, mode in found.items() if mode & 0o077}
    assert len(found) > 1 and not wrong


async def test_files_drafts_and_what_is_known_of_them_are_closed_to_others(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files", max_bytes=10_000)
    async with files.draft("file-1", max_bytes=1_000) as draft:
        await draft.write(b"a prompt")
        assert_closed(tmp_path / "files")
        await draft.keep(name="lines.jsonl", purpose="batch")
    assert_closed(tmp_path / "files")
    assert {"file-1/content", "file-1/info.json"} <= modes(tmp_path / "files").keys()


async def test_a_store_that_was_open_to_others_is_closed_when_it_is_opened(tmp_path: Path) -> None:
    for folder in (tmp_path / "files", tmp_path / "files" / ".drafts"):
        folder.mkdir(mode=0o755)
    with capture_logs() as logs:
        LocalFiles(tmp_path / "files", max_bytes=10_000)
    assert_closed(tmp_path / "files")
    assert {entry["folder"] for entry in logs} == {str(tmp_path / "files"), str(tmp_path / "files" / ".drafts")}


def test_a_folder_that_users_share_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with capture_logs() as logs:
        private_folder(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_a_file_that_was_open_to_others_is_closed_when_it_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"longer than before")
    path.chmod(0o644)
    with create_private(path) as file:
        file.write(b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"


@pytest.mark.system
async def test_logs_are_closed_to_others_also_in_a_folder_that_was_not(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o755)
    child = await ProcessLauncher(logs).start(ChildSpec("probe", ("python", "-c", "pass"), {}))
    await child.wait()
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700


def test_the_history_file_and_its_folder_are_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "history" / "history.sqlite"
    HistoryFile(path, "local", ()).close()
    path.chmod(0o644)
    history = HistoryFile(path, "local", ())
    assert_closed(path.parent)
    assert len(list(path.parent.iterdir())) > 1  # while it is open, what SQLite writes beside it
    history.close()


def test_memory_that_workers_share_is_closed_to_others(tmp_path: Path) -> None:
    pool = PoolFile(tmp_path, "fulcrum-kv-w-1", blocks=1, block_bytes=4096)
    assert stat.S_IMODE((tmp_path / "fulcrum-kv-w-1").stat().st_mode) == 0o600
    pool.close()
