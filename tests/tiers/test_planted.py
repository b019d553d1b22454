"""Files that strangers leave where slabs are: their folders, links, pipes, holes."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.tiers import FileTier, Namespace, TierError, TierInUseError
from kvoffload.tiers.engine.native import Twin
from kvoffload.tiers.local.slab import Verdict, find_slabs, remove_slab, verify_slab
from kvoffload.tiers.local.slab.layout import Header, record_offset
from kvoffload.tiers.seal import Seal
from tests.tiers.inside import slots_of

from .attack import (
    BLOCK_BYTES,
    NAMESPACE,
    Universe,
    _run,
    kill,
    make_image,
    mounted,
    need,
    open_slab,
    start,
)

NAMES = ("blocks.dat", "slots.tbl", "namespace.json", "lock")
LARGEST_BLOCK = 2**32 - 4096


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Return the folder of a slab with blocks, closed."""
    universe = Universe(8)
    tier, region = open_slab(tmp_path / "kv", 8)
    universe.put(tier, region, universe.keys)
    tier.close()
    return tier.folder


def opens(path: Path) -> FileTier:
    return FileTier(path, 8 * BLOCK_BYTES, namespace=NAMESPACE)


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_what_others_may_write_is_refused(slab: Path, name: str, mode: int) -> None:
    path = slab / name if name else slab
    path.chmod(mode | 0o100 if name == "" else mode)
    shown = f"mode {mode | 0o100:04o}" if name == "" else f"mode {mode:04o}"
    with pytest.raises(TierError, match=f"{path}: others may write to it .{shown}"):
        opens(slab.parent)
    path.chmod(0o700)
    with opens(slab.parent) as tier:
        assert tier.num_restored == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
@pytest.mark.parametrize("name", ["", *NAMES])
def test_what_belongs_to_another_is_refused(slab: Path, name: str) -> None:
    path = slab / name if name else slab
    os.chown(path, 12_345, -1)
    with pytest.raises(TierError, match=f"{path}: belongs to user 12345, must belong to"):
        opens(slab.parent)
    assert find_slabs(slab.parent)[0].num_blocks == 8, "who looks need not own it"
    assert verify_slab(slab).sound == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_a_second_name_is_refused(slab: Path, tmp_path: Path, name: str) -> None:
    os.link(slab / name, tmp_path / "second")
    with pytest.raises(TierError, match=f"{slab / name}: has 2 names"):
        opens(slab.parent)


def test_a_linked_slab_is_refused_and_a_linked_path_is_followed(slab: Path, tmp_path: Path) -> None:
    """The way to the folder is the user's; the slab in it belongs to the tier alone."""
    (tmp_path / "way").symlink_to(slab.parent)
    with opens(tmp_path / "way") as tier:
        assert tier.num_restored == 8
    (tmp_path / "kv2").mkdir()
    (tmp_path / "kv2" / slab.name).symlink_to(slab)
    before = {path.name: path.read_bytes() for path in slab.iterdir()}
    with pytest.raises(TierError, match="is a link, which is not followed"):
        opens(tmp_path / "kv2")
    with pytest.raises(TierError, match="no slab is here"):
        find_slabs(tmp_path / "kv2")
    with pytest.raises(TierError, match="is a link"):
        remove_slab(tmp_path / "kv2" / slab.name)
    assert {path.name: path.read_bytes() for path in slab.iterdir()} == before
    assert find_slabs(tmp_path / "way")[0].num_blocks == 8


def test_forget_deletes_nothing_elsewhere(slab: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for name in ("blocks.dat", "slots.tbl"):
        (slab / name).unlink()
        (slab / name).symlink_to(precious)
    (slab / "notes").write_text("of the user")
    (found,) = find_slabs(slab)
    assert found.header is None
    remove_slab(slab)
    assert [path.name for path in slab.iterdir()] == ["notes"]
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("name", [*NAMES, "forgetting", "slots.tbl.new"])
def test_a_pipe_keeps_no_one_waiting(slab: Path, name: str) -> None:
    """It is no ordinary file, or is not read at all."""
    (slab / name).unlink(missing_ok=True)
    os.mkfifo(slab / name)

    def work() -> None:
        signal.alarm(30)
        for call, argument in (
            (opens, slab.parent),
            (find_slabs, slab.parent),
            (verify_slab, slab),
            (remove_slab, slab),
        ):
            with contextlib.suppress(TierError):
                call(argument)

    _, status = os.waitpid(start(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0


# -- files that take nothing on the disk -----------------------------------------------------------


def plant(folder: Path, header: Header, slots: list[int], pages: list[int]) -> None:
    """Make a sparse slab with seals in some slots, and pages of bytes at offsets of its blocks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "slots.tbl").open("wb") as file:
        file.write(header.pack())
        for slot in slots:
            file.seek(record_offset(slot))
            file.write(Seal(b"%d" % slot, header.block_bytes, 1).pack(header.epoch))
        file.truncate(header.table_bytes)
    with (folder / "blocks.dat").open("wb") as file:
        for offset in pages:
            file.seek(offset)
            file.write(b"\1" * 4096)
        file.truncate(min(header.data_bytes, 2**43))


def test_a_sparse_slab_costs_what_it_holds(tmp_path: Path) -> None:
    """A table for two thousand million blocks of 4 GiB each, in 12 KiB."""
    folder = tmp_path / NAMESPACE.fingerprint.hex()
    header = Header(NAMESPACE.fingerprint, LARGEST_BLOCK, LARGEST_BLOCK, 2**31 - 1, 5)
    try:
        plant(folder, header, [0, 1, 2**31 - 2], [])
    except OSError as error:
        pytest.skip(f"the file system has no such large files: {error}")
    (found,) = find_slabs(tmp_path)
    assert (found.num_blocks, found.num_stale) == (3, 0)
    assert found.disk_bytes < 2**16
    assert verify_slab(folder) == Verdict(0, [b"0", b"1", b"%d" % (2**31 - 2)])
    with opens(tmp_path) as tier:
        assert tier.num_restored == 0


def test_a_block_with_holes_is_verified_without_memory_for_them(tmp_path: Path) -> None:
    block_bytes = 2**27
    data = bytearray(block_bytes)
    data[8192:12_288] = b"\1" * 4096
    namespace = Namespace("sparse", block_bytes)
    seal = Seal.of(namespace.fingerprint, b"0", bytes(data))
    del data
    header = Header(namespace.fingerprint, block_bytes, block_bytes, 3, 5)
    folder = tmp_path / "slab"
    plant(folder, header, [0, 1, 2], [8192, block_bytes])
    with (folder / "slots.tbl").open("r+b") as file:
        file.seek(record_offset(0))
        file.write(seal.pack(5))
    script = f"""
from kvoffload.tiers.local.slab import verify_slab
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
before = peak()
found = verify_slab({str(folder)!r})
assert (found.sound, sorted(found.corrupt)) == (1, [b"1", b"2"]), found
assert peak() - before < 32_768, (before, peak())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- who only looks --------------------------------------------------------------------------------


def test_looking_at_a_slab_does_not_keep_an_engine_from_it(slab: Path) -> None:
    """Looked at without end, by two, it opens each time."""

    def look() -> None:
        while True:
            find_slabs(slab)

    lookers = [start(look), start(look)]
    try:
        for _ in range(200):
            opens(slab.parent).close()
    finally:
        for child in lookers:
            kill(child)


def test_verifying_keeps_an_engine_out_and_says_so(slab: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvoffload.tiers.local.slab.lock.READERS_S", 0.05)
    refused = []

    def during(_: int) -> None:
        if not refused:
            with pytest.raises(TierInUseError, match="in use: its blocks are being verified"):
                opens(slab.parent)
            refused.append(True)
        assert verify_slab(slab).sound == 8, "two may read"

    assert verify_slab(slab, during).sound == 8
    assert refused


def test_a_slab_on_a_read_only_file_system_is_verified(tmp_path: Path, tier_twin: Twin) -> None:
    need("mkfs.ext4")
    make_image(tmp_path / "disk.img", 16)
    universe = Universe(8)
    with mounted(tmp_path / "disk.img", tmp_path / "disk") as disk:
        tier, region = open_slab(disk / "kv", 8, twin=tier_twin)
        universe.put(tier, region, universe.keys)
        tier.close()
        _run("mount", "-o", "remount,ro", disk)
        assert verify_slab(tier.folder).sound == 8
        assert find_slabs(disk / "kv")[0].num_blocks == 8
        (tier.folder / "lock").stat()
        with pytest.raises(TierError, match="Read-only file system"):
            opens(disk / "kv")


def test_a_slab_shrinks_on_a_full_disk(tmp_path: Path, tier_twin: Twin) -> None:
    """By one slot only, where even the new table has no room."""
    need("mkfs.ext4")
    make_image(tmp_path / "disk.img", 32)
    universe = Universe(300)
    with mounted(tmp_path / "disk.img", tmp_path / "disk") as disk:
        tier, region = open_slab(disk / "kv", 300, twin=tier_twin)
        for first in range(0, 300, 30):
            universe.put(tier, region, universe.keys[first : first + 30])
        slots = dict(zip(universe.keys, slots_of(tier, universe.keys), strict=True))
        tier.close()
        with (disk / "filler").open("wb") as filler:
            for size in (2**20, 4096, 512):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(size))
                        filler.flush()
            for num_slots in (299, 100):
                tier, region = open_slab(disk / "kv", num_slots, twin=tier_twin)
                found = universe.check(tier, region)
                kept = {key for key, slot in slots.items() if slot < num_slots}
                assert {key for key, status in found.items() if status == 0} == kept
                tier.close()
