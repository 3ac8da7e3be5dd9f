"""Tests of KV pools in files: created completely or not at all, shared by folder, and removed after their owner."""

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from libs.contracts.errors import KvLost
from libs.engine.kv_shared_pool import (
    HEADER_BYTES,
    MAX_MAPS,
    PREFIX,
    PoolFile,
    PoolFileError,
    PoolMap,
    PoolMaps,
    file_name,
    sweep,
)

NAME = file_name("worker-0", 7)
OWNER = """
import sys
from pathlib import Path
from libs.engine.kv_shared_pool import PoolFile, file_name
file = PoolFile(Path(sys.argv[1]), file_name("killed", 1), blocks=4, block_bytes=4096)
file.memory[-4096:] = b"k" * 4096
print("ready", flush=True)
sys.stdin.read()
"""


def mapped() -> list[str]:
    """Return the mappings of pool files by this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if PREFIX in line]


def make(folder: Path, name: str = NAME) -> PoolFile:
    return PoolFile(folder, name, blocks=4, block_bytes=4096)


def test_data_written_by_the_owner_is_read_through_a_map(tmp_path: Path) -> None:
    file = make(tmp_path)
    maps = PoolMaps(tmp_path)
    pool = maps.get("worker-0", 7)
    assert pool is not None and maps.get("worker-0", 7) is pool
    assert pool.nonce == file.header.nonce and len(pool.nonce) == 16
    file.memory[HEADER_BYTES + 4096 : HEADER_BYTES + 8192] = b"x" * 4096
    assert pool.block(1) == b"x" * 4096 and pool.block(0) == bytes(4096)
    for number in (-1, 4):
        with pytest.raises(KvLost):
            pool.block(number)
    with pytest.raises(TypeError):
        pool.block(0)[0] = 1
    file.close()


def test_a_file_is_private_to_its_user_and_allocates_all_its_memory_at_once(tmp_path: Path) -> None:
    file = make(tmp_path)
    found = (tmp_path / NAME).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == file.header.size <= found.st_blocks * 512
    file.close()
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_full_or_missing_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PoolFileError, match="has no room for"):
        PoolFile(tmp_path, NAME, blocks=2**30, block_bytes=2**20)
    with pytest.raises(PoolFileError, match="No such file"):
        make(tmp_path / "absent")
    assert not list(tmp_path.iterdir())


def test_two_pools_never_share_a_file(tmp_path: Path) -> None:
    file = make(tmp_path)
    with pytest.raises(PoolFileError, match="exists"):
        make(tmp_path)
    assert PoolMaps(tmp_path).get("worker-0", 7) is not None
    file.close()


def test_a_sweep_removes_only_files_without_an_owner(tmp_path: Path) -> None:
    file = make(tmp_path)
    (tmp_path / f"{PREFIX}left").write_bytes(b"left by a crash")
    (tmp_path / "something else").write_bytes(b"")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "something else")
    assert sweep(tmp_path) == [f"{PREFIX}left"]
    assert (tmp_path / NAME).exists() and (tmp_path / "something else").exists()
    file.close()


@pytest.mark.system
def test_the_memory_of_a_killed_owner_is_freed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        maps = PoolMaps(tmp_path)
        pool = maps.get("killed", 1)
        assert pool is not None and pool.block(3) == b"k" * 4096
        view = pool.block(3)
        maps.drop_unowned()
        assert len(maps) == 1 and sweep(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert sweep(tmp_path) == [file_name("killed", 1)]
    maps.drop_unowned()
    assert len(maps) == 0 and view == b"k" * 4096  # what is being copied can be read to its end
    assert mapped()
    del pool, view
    assert not mapped()


@pytest.mark.parametrize("damage", ["empty", "short", "no pool", "another host", "cut off", "a link", "absent"])
def test_a_foreign_or_damaged_file_is_not_mapped(tmp_path: Path, damage: str) -> None:
    path = tmp_path / NAME
    file = make(tmp_path)
    whole = path.read_bytes()
    file.close()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    damaged = {
        "empty": b"",
        "short": whole[:100],
        "no pool": b"x" * len(whole),
        "another host": whole.replace(boot_id, b"0" * 36),
        "cut off": whole[:-1],
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    elif damage == "a link":
        (tmp_path / "other").write_bytes(whole)
        path.symlink_to(tmp_path / "other")
    with pytest.raises(PoolFileError):
        PoolMap(path)
    assert PoolMaps(tmp_path).get("worker-0", 7) is None


def test_maps_are_bounded_and_all_are_unmapped_at_the_end(tmp_path: Path) -> None:
    files = [make(tmp_path, file_name(f"w{number}", 1)) for number in range(MAX_MAPS + 3)]
    maps = PoolMaps(tmp_path)
    for number in range(len(files)):
        assert maps.get(f"w{number}", 1) is not None
    assert len(maps) == MAX_MAPS
    maps.close()
    for file in files:
        file.close()
        file.memory.close()
    assert not mapped()


def test_names_stay_inside_the_folder() -> None:
    name = file_name("../../etc/passwd", 255)
    assert "/" not in name and name.startswith(PREFIX) and name.endswith("-ff")
