"""Files that strangers leave where slabs are: their folders, links, pipes, holes."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.testing.tiers import PATIENCE_S
from kvoffload.tiers import FileTier, Namespace, TierError, TierInUseError
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.local.slab import Verdict, find_slabs, remove_slab, verify_slab
from kvoffload.tiers.local.slab.layout import Header, record_offset
from tests.isolated.scripts import run_script
from tests.tiers.seals import Seal

from .attack import BLOCK_BYTES, NAMESPACE, Universe, _run, kill, new_disk, open_slab, start
from .planted import KINDS, Victim, everything

NAMES = ("blocks.dat", "slots.tbl", "namespace.json", "lock")
LARGEST_BLOCK = 2**32 - 4096


@pytest.fixture
def slab(tmp_path: Path) -> Path:
    """Return the folder of a slab with blocks, closed."""
    universe = Universe(8)
    tier, region = open_slab(tmp_path / "kv", 8)
    universe.put(tier, region)
    tier.close()
    return tier.folder


def opens(path: Path) -> FileTier:
    return FileTier(path, 8 * BLOCK_BYTES, namespace=NAMESPACE)


@pytest.mark.parametrize("name", NAMES[:2] + NAMES[3:])
def test_a_file_with_a_second_name_is_not_written_to(slab: Path, name: str) -> None:
    path, second = slab / name, slab.parents[1] / "second"
    os.link(path, second)
    with pytest.raises(TierError, match=re.escape(f"{path}: has 2 names")):
        opens(slab.parent)
    assert find_slabs(slab.parent)[0].num_blocks == 8, "to look at it is allowed"
    assert verify_slab(slab).sound == 8
    second.unlink()
    with opens(slab.parent) as tier:
        assert tier.num_restored == 8


CALLS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "open": (lambda slab: opens(slab.parent).close(), ("", "blocks.dat", "slots.tbl", "lock")),
    "find": (lambda slab: find_slabs(slab.parent), ("",)),
    "verify": (verify_slab, ("", "blocks.dat", "slots.tbl", "lock")),
    "remove": (remove_slab, ("", "lock")),
}
"""The calls, and the places at which each refuses a link and a pipe; at others it does its work."""


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    """Have a call raise that waits for the other end of a pipe."""

    def ring(*_: object) -> None:
        raise AssertionError("it waits")

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(PATIENCE_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if "link to" in kind), "own", "pipe"])
@pytest.mark.parametrize("name", ["", *NAMES, "slots.tbl.new", "namespace.json.new"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_planted_is_followed_or_waited_for(
    slab: Path, tmp_path: Path, call: str, name: str, kind: str
) -> None:
    """A link of the kind ``own`` leads to what was there before."""
    path, aside, victim = slab / name, tmp_path / "aside", Victim(tmp_path / "victim")
    (slab / "notes").write_text("of the user")
    if path.exists():
        path.rename(aside)
    KINDS.get(kind, lambda path, _: path.symlink_to(aside))(path, victim)
    before = everything(aside) if aside.exists() else None
    do, refused = CALLS[call]
    if name in refused or (call, name, kind) == ("open", "namespace.json", "pipe"):
        said = str(path) if name or kind == "pipe" else f"{path}: is a link, which is not followed"
        said = "no slab is here" if call == "find" else said
        with pytest.raises((TierError, OSError), match=re.escape(said)):
            do(slab)
        assert os.path.lexists(path)
    else:
        found = do(slab)
        assert call != "find" or (found[0].header is None) == (name == "slots.tbl")
        assert call != "remove" or [path.name for path in slab.iterdir()] == ["notes"]
    assert victim.is_untouched()
    assert before is None or everything(aside) == before


def test_a_link_on_the_way_to_a_slab_is_followed(slab: Path, tmp_path: Path) -> None:
    """The way to the folder is the user's; the slab in it belongs to the tier alone."""
    (tmp_path / "way").symlink_to(slab.parent)
    with opens(tmp_path / "way") as tier:
        assert tier.num_restored == 8
    assert find_slabs(tmp_path / "way")[0].num_blocks == 8


# -- files that take nothing on the disk -----------------------------------------------------------


def plant(folder: Path, header: Header, slots: list[int], pages: list[int]) -> None:
    """Make a sparse slab with seals in some slots, and pages of bytes at offsets of its blocks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "slots.tbl").open("wb") as file:
        file.write(header.pack())
        for slot in slots:
            file.seek(record_offset(slot))
            file.write(Seal(b"%d" % slot, header.block_bytes, 1).pack(header.generation.number))
        file.truncate(header.table_bytes)
    with (folder / "blocks.dat").open("wb") as file:
        for offset in pages:
            file.seek(offset)
            file.write(b"\1" * 4096)
        file.truncate(min(header.data_bytes, 2**43))


def test_a_sparse_slab_costs_what_it_holds(tmp_path: Path) -> None:
    """A table for two thousand million blocks of 4 GiB each, in 12 KiB."""
    folder = tmp_path / NAMESPACE.fingerprint.hex()
    header = Header(
        NAMESPACE.fingerprint, LARGEST_BLOCK, LARGEST_BLOCK, 2**31 - 1, Generation.of("")
    )
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
    header = Header(namespace.fingerprint, block_bytes, block_bytes, 3, Generation.of(""))
    folder = tmp_path / "slab"
    plant(folder, header, [0, 1, 2], [8192, block_bytes])
    with (folder / "slots.tbl").open("r+b") as file:
        file.seek(record_offset(0))
        file.write(seal.pack(0))
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
    run_script(script)


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
    monkeypatch.setattr("kvoffload.tiers.local.slab.folder.READERS_S", 0.05)
    refused = []

    def during(_: int) -> None:
        if not refused:
            with pytest.raises(TierInUseError, match="in use: its blocks are being verified"):
                opens(slab.parent)
            refused.append(True)
        assert verify_slab(slab).sound == 8, "two may read"

    assert verify_slab(slab, during).sound == 8
    assert refused


def test_a_slab_on_a_read_only_file_system_is_verified(tmp_path: Path) -> None:
    universe = Universe(8)
    with new_disk(tmp_path, 16) as disk:
        tier, region = open_slab(disk / "kv", 8)
        universe.put(tier, region)
        tier.close()
        _run("mount", "-o", "remount,ro", disk)
        assert verify_slab(tier.folder).sound == 8
        assert find_slabs(disk / "kv")[0].num_blocks == 8
        (tier.folder / "lock").stat()
        with pytest.raises(TierError, match="Read-only file system"):
            opens(disk / "kv")
