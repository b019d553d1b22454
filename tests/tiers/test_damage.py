"""Damaged files: what is wrong is never served, and its neighbours are unhurt."""

import os
import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.tiers import FileTier, Namespace, Region, State, Status
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.local.slab import Verdict, verify_slab
from kvoffload.tiers.local.slab.files import read_table
from kvoffload.tiers.local.slab.layout import HEADER_BYTES, Header, record_offset
from kvoffload.tiers.native import io
from kvoffload.tiers.seal import SEAL_BYTES
from tests.tiers.inside import slots_of
from tests.tiers.seals import Seal

from .attack import BLOCK_BYTES, NAMESPACE, Universe, open_slab, report, rounds

pytestmark = pytest.mark.attack

NUM_SLOTS = 64


class Slab:
    """A slab full of blocks, closed, whose files can be damaged and made whole again."""

    def __init__(self, path: Path) -> None:
        self.path = path / "slab"
        self.universe = Universe(NUM_SLOTS)
        tier, region = open_slab(self.path, NUM_SLOTS)
        self.folder = tier.folder
        assert not self.universe.put(tier, region).any()
        self.slot_of = dict(
            zip(self.universe.keys, slots_of(tier, self.universe.keys), strict=True)
        )
        tier.close()
        self.whole = path / "whole"
        shutil.copytree(self.folder, self.whole)
        self.blocks = self.folder / "blocks.dat"
        self.table = self.folder / "slots.tbl"

    def mend(self) -> None:
        """Make the files whole again."""
        for name in ("blocks.dat", "slots.tbl", "namespace.json"):
            shutil.copyfile(self.whole / name, self.folder / name)

    def change(self, path: Path, offset: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def bytes_at(self, path: Path, offset: int, nbytes: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)

    def block_offset(self, key: bytes) -> int:
        return self.slot_of[key] * BLOCK_BYTES

    def seal_offset(self, key: bytes) -> int:
        return record_offset(self.slot_of[key])

    def swap(self, path: Path, size: int, left: int, right: int) -> None:
        left_bytes, right_bytes = (self.bytes_at(path, start, size) for start in (left, right))
        self.change(path, left, right_bytes)
        self.change(path, right, left_bytes)

    def flip(self, path: Path, bit: int) -> None:
        (byte,) = self.bytes_at(path, bit // 8, 1)
        self.change(path, bit // 8, bytes([byte ^ 1 << bit % 8]))

    def served(self) -> dict[bytes, Status]:
        """Open the slab, compare what it serves, and close it."""
        tier, region = open_slab(self.path, NUM_SLOTS)
        tier.health(reset=True)
        found = self.universe.check(tier, region, reset_every=1)
        again = self.universe.check(tier, region)
        assert Status.CORRUPT not in again.values(), "what was corrupt must be dropped"
        tier.close()
        return found


@pytest.fixture
def slab(tmp_path: Path) -> Slab:
    return Slab(tmp_path)


def test_random_bits(slab: Slab, seed: int) -> None:
    """Flip bits of blocks and seals. Stated: 10,000 bits, in 250 rounds of 40."""
    chance = random.Random(seed)
    turns, flipped, corrupt = rounds(250), 0, 0
    for _ in range(turns):
        hit = chance.sample(slab.universe.keys, 40)
        for key in hit:
            slot = slab.slot_of[key]
            if chance.random() < 0.5:
                bit = slot * BLOCK_BYTES * 8 + chance.randrange(BLOCK_BYTES * 8)
                slab.flip(slab.blocks, bit)
            else:
                slab.flip(slab.table, record_offset(slot) * 8 + chance.randrange(SEAL_BYTES * 8))
            flipped += 1
        found = slab.served()
        for key, status in found.items():
            expected = {Status.CORRUPT, Status.MISS} if key in hit else {Status.OK}
            assert status in expected, key
        corrupt += sum(status == Status.CORRUPT for status in found.values())
        slab.mend()
    report(f"{flipped} bits, each block caught ({corrupt} when read), no neighbour hurt")


def test_every_byte_of_the_header(slab: Slab) -> None:
    """One copy of the header may be damaged; without both there is nothing, and no error."""
    for place in range(0, 80, max(1, 20 // rounds(20))):
        for starts in ((0,), (2048,), (0, 2048)):
            for start in starts:
                (byte,) = slab.bytes_at(slab.table, start + place, 1)
                slab.change(slab.table, start + place, bytes([byte ^ 0x10]))
            expected = Status.MISS if len(starts) == 2 else Status.OK
            assert set(slab.served().values()) == {expected}, (place, starts)
            slab.mend()


def test_swapped_slots(slab: Slab) -> None:
    """Blocks in each other's slots, seals in each other's place, and both: then all is right."""
    first, second = slab.universe.keys[3], slab.universe.keys[40]
    for blocks, seals in ((True, False), (False, True), (True, True)):
        if blocks:
            slab.swap(slab.blocks, BLOCK_BYTES, slab.block_offset(first), slab.block_offset(second))
        if seals:
            slab.swap(slab.table, SEAL_BYTES, slab.seal_offset(first), slab.seal_offset(second))
        found = slab.served()
        expected = Status.OK if blocks and seals else Status.CORRUPT
        assert [found.pop(first), found.pop(second)] == [expected] * 2
        assert set(found.values()) == {Status.OK}
        slab.mend()


def test_one_block_twice(slab: Slab) -> None:
    """Two slots with one block and one seal: the block is served, the one it replaced is gone."""
    first, second = slab.universe.keys[3], slab.universe.keys[40]
    for path, size, offset in (
        (slab.table, SEAL_BYTES, slab.seal_offset),
        (slab.blocks, BLOCK_BYTES, slab.block_offset),
    ):
        slab.change(path, offset(second), slab.bytes_at(path, offset(first), size))
    found = slab.served()
    assert found.pop(second) == Status.MISS
    assert set(found.values()) == {Status.OK}


def test_blocks_of_another_model(slab: Slab, tmp_path: Path) -> None:
    """Blocks and seals from another namespace, with another generation and with this slab's."""
    other = Namespace("another model", BLOCK_BYTES)
    for generation in ("other", ""):
        tier = FileTier(
            tmp_path / f"of {generation}",
            NUM_SLOTS * BLOCK_BYTES,
            namespace=other,
            generation=generation,
        )
        region = Region.allocate(32, BLOCK_BYTES)
        tier.attach(region)
        assert not slab.universe.put(tier, region, slab.universe.keys[:32]).any()
        tier.close()
        table = (tier.folder / "slots.tbl").read_bytes()
        shutil.copyfile(tier.folder / "blocks.dat", slab.blocks)
        slab.change(slab.table, HEADER_BYTES, table[HEADER_BYTES : record_offset(NUM_SLOTS)])
        found = slab.served()
        expected = {Status.MISS} if generation else {Status.MISS, Status.CORRUPT}
        assert set(found.values()) == expected
        slab.mend()


def test_a_block_that_is_not_its_keys_is_corrupt(slab: Slab) -> None:
    """A seal that is right in itself and names another key than the bytes belong to."""
    keys = slab.universe.keys
    header = Header.unpack(slab.bytes_at(slab.table, 0, HEADER_BYTES))
    slot = slab.slot_of[keys[0]]
    data = slab.universe.data[keys[0]]
    own = Seal.of(NAMESPACE.fingerprint, keys[0], data)
    for forged in (
        own._replace(key=keys[1]),  # as if block 0 had been stored as block 1
        own._replace(key=b"unheard of"),
        own._replace(sum=own.sum ^ 1),
        own._replace(nbytes=BLOCK_BYTES - 1),
        Seal.of(bytes(16), keys[0], data),
    ):
        slab.change(slab.table, record_offset(slot), forged.pack(header.generation.number))
        tier, region = open_slab(slab.path, NUM_SLOTS)
        found = slab.universe.check(tier, region, keys)
        assert found[keys[0]] != Status.OK
        assert found[keys[1]] in {Status.OK, Status.CORRUPT}  # two slots claim it
        assert {found[key] for key in keys[2:]} == {Status.OK}
        tier.close()
        slab.mend()


def test_too_many_corrupt_blocks_stop_reads(tmp_path: Path) -> None:
    universe = Universe(40)
    tier, region = open_slab(tmp_path, NUM_SLOTS)
    universe.put(tier, region, universe.keys[:30])
    with (tier.folder / "blocks.dat").open("r+b") as file:
        file.write(bytes(12 * BLOCK_BYTES))
    found = universe.check(tier, region, universe.keys[:10])
    assert Status.OK not in found.values()
    assert tier.health().reads == "stopped"
    assert (tier.lookup(universe.keys) == State.MISS).all()
    assert set(universe.check(tier, region, universe.keys[15:30]).values()) == {Status.UNAVAILABLE}
    assert not universe.put(tier, region, universe.keys[30:]).any()  # writes go on
    assert tier.health(reset=True).ok
    assert set(universe.check(tier, region, universe.keys[15:]).values()) == {Status.OK}
    tier.close()


def test_files_that_were_cut(slab: Slab) -> None:
    for size in (0, 1, 4096, 10 * BLOCK_BYTES + 5, 63 * BLOCK_BYTES):
        os.truncate(slab.blocks, size)
        kept = size // BLOCK_BYTES
        found = slab.served()
        for key, slot in slab.slot_of.items():
            assert (found[key] == Status.OK) == (slot < kept), (size, slot)
        slab.mend()
    for size in (0, 79, 4096, record_offset(7) + 63, record_offset(NUM_SLOTS)):
        os.truncate(slab.table, size)
        kept = max(0, (size - HEADER_BYTES) // SEAL_BYTES)
        found = slab.served()
        for key, slot in slab.slot_of.items():
            assert (found[key] == Status.OK) == (slot < kept), (size, slot)
        slab.mend()


def test_a_file_that_is_cut_while_the_tier_is_open(tmp_path: Path) -> None:
    universe = Universe(32)
    tier, region = open_slab(tmp_path, 32)
    universe.put(tier, region)
    os.truncate(tier.folder / "blocks.dat", 20 * BLOCK_BYTES + 100)
    os.truncate(tier.folder / "slots.tbl", 0)
    statuses = [*universe.check(tier, region, reset_every=1).values()]
    assert statuses == [Status.OK] * 20 + [Status.CORRUPT] * 12
    tier.close()


def test_the_json_beside_the_data_is_compared(slab: Slab) -> None:
    path = slab.folder / "namespace.json"
    for text in (b"", b"{}", b"\xff\x00", NAMESPACE.json.encode()[:-1]):
        path.write_bytes(text)
        assert set(slab.served().values()) == {Status.MISS}
        assert path.read_text() == NAMESPACE.json
        slab.mend()


def test_all_mixtures_of_old_and_new_sectors(tmp_path: Path, seed: int) -> None:
    """A power cut can leave any sector of any file old or new. Stated: 1,000 mixtures."""
    universe = Universe(2 * NUM_SLOTS)
    tier, region = open_slab(tmp_path / "slab", NUM_SLOTS)
    universe.put(tier, region, universe.keys[:64])
    tier.close()
    names = ("blocks.dat", "slots.tbl")
    old = {name: np.fromfile(tier.folder / name, np.uint8).reshape(-1, 512) for name in names}
    tier, region = open_slab(tmp_path / "slab", NUM_SLOTS)
    for start in range(64, 128, 16):  # each evicts, and writes other bytes into the slots
        universe.put(tier, region, universe.keys[start : start + 16])
    tier.close()
    new = {name: np.fromfile(tier.folder / name, np.uint8).reshape(-1, 512) for name in names}
    rng = np.random.default_rng(seed)
    turns, compared, corrupt = rounds(1000), 0, 0
    for _ in range(turns):
        share = rng.choice([0.02, 0.5, 0.98])
        for name in names:
            unit = rng.choice([1, 8, 32])  # sectors, pages, whole blocks
            is_new = np.repeat(rng.random(-(-len(old[name]) // unit)) < share, unit)
            is_new = is_new[: len(old[name]), None]
            np.where(is_new, new[name], old[name]).tofile(tier.folder / name)
        tier, region = open_slab(tmp_path / "slab", NUM_SLOTS)
        found = universe.check(tier, region, reset_every=8)
        tier.close()
        compared += sum(status == Status.OK for status in found.values())
        corrupt += sum(status == Status.CORRUPT for status in found.values())
    assert compared
    assert corrupt
    report(f"{turns} mixtures, {compared} blocks compared, none wrong; {corrupt} caught as corrupt")


# -- tables from strangers -----------------------------------------------------------------------


def test_a_table_that_claims_too_much_takes_no_memory(tmp_path: Path) -> None:
    folder = tmp_path / NAMESPACE.fingerprint.hex()
    folder.mkdir()
    header = Header(NAMESPACE.fingerprint, BLOCK_BYTES, BLOCK_BYTES, 2**31 - 1, Generation.of(""))
    (folder / "slots.tbl").write_bytes(header.pack() + b"\1" * 1000)
    tracemalloc.start()
    fd = os.open(folder / "slots.tbl", os.O_RDONLY)
    found, records, stamps = read_table(fd, NUM_SLOTS)
    os.close(fd)
    assert (found, len(records), len(stamps)) == (header, 15 * SEAL_BYTES, 15)
    tier = FileTier(tmp_path, 10 * BLOCK_BYTES, namespace=NAMESPACE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert tier.num_restored == 0
    tier.close()
    assert (folder / "slots.tbl").stat().st_size < 2**15


def test_blocks_are_verified_whole_where_a_read_gives_a_part(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux gives 2 GiB less a page at most; here it is a page, of blocks of several."""
    page, pread, preadv = 4096, os.pread, os.preadv
    assert 2 * page < BLOCK_BYTES
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, page), offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:page]], offset)
    )
    assert verify_slab(slab.folder) == Verdict(NUM_SLOTS, [])
    key = slab.universe.keys[5]
    last = slab.slot_of[key] * BLOCK_BYTES + BLOCK_BYTES - 1
    (byte,) = slab.bytes_at(slab.blocks, last, 1)
    slab.change(slab.blocks, last, bytes([byte ^ 1]))
    assert verify_slab(slab.folder) == Verdict(NUM_SLOTS - 1, [key])


@pytest.mark.parametrize("stamp", [2**63 - 1, 2**63 - 2, 2**62 + 1])
def test_a_stamp_that_no_use_can_have(slab: Slab, stamp: int) -> None:
    """The order of use is kept, and counted on from where there is room."""
    first, last, *_ = slab.universe.keys
    offset = Header.unpack(slab.table.read_bytes()).stamps_offset
    slab.change(slab.table, offset + 8 * slab.slot_of[last], stamp.to_bytes(8, "little"))
    assert set(slab.served().values()) == {Status.OK}
    tier, _ = open_slab(slab.path, NUM_SLOTS)
    tier.touch([first])
    tier.close()
    stamps = np.frombuffer(slab.table.read_bytes()[offset:], "<i8")[:NUM_SLOTS]
    assert len(set(stamps.tolist())) == NUM_SLOTS
    assert stamps.max() <= NUM_SLOTS + 1
    assert np.argsort(stamps)[-2:].tolist() == [slab.slot_of[last], slab.slot_of[first]]


@settings(max_examples=max(20, rounds(2000)))
@given(data=st.data())
def test_fuzzed_headers_and_records(data: st.DataObject) -> None:
    """Any bytes are read without an error, and only what is sealed counts."""
    fields = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 100))
    page = bytearray(
        Header(
            data.draw(st.binary(min_size=16, max_size=16)),
            data.draw(st.integers(0, 2**64 - 1)),
            data.draw(fields),
            data.draw(fields),
            Generation.of(data.draw(st.text("ab é", max_size=64))),
        ).pack()
    )
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=3)
    ):
        page[place] = value
    for text in (bytes(page), data.draw(st.binary(max_size=200))):
        header = Header.unpack(text)
        if header is not None:
            assert 1 <= header.num_slots < 2**31
            assert header.slot_bytes - 4096 < header.block_bytes <= header.slot_bytes
    records = bytearray(data.draw(st.binary(max_size=400)))
    good = Seal(b"key", 100, 7).pack(3)
    places = data.draw(st.lists(st.integers(0, 5), max_size=3, unique=True))
    for slot in places:
        end = (slot + 1) * SEAL_BYTES
        records.extend(bytes(max(0, end - len(records))))
        records[end - SEAL_BYTES : end] = good
    slots, keys, sums, others = io.valid_records(bytes(records), 100, 3)
    assert slots.tolist() == sorted(places)
    assert keys == [b"key"] * len(places)
    assert sums.tolist() == [7] * len(places)
    whole = [records[at : at + SEAL_BYTES] for at in range(0, len(records) - 63, SEAL_BYTES)]
    assert others == sum(any(record) for record in whole) - len(places)


def test_fuzzed_files(slab: Slab, seed: int) -> None:
    """Overwrite stretches of the files with anything. Stated: 400 rounds."""
    chance = random.Random(seed)
    turns, survived = rounds(400), 0
    for _ in range(turns):
        for path in (slab.blocks, slab.table):
            for _ in range(chance.randrange(4)):
                size = path.stat().st_size
                length = chance.choice([1, 64, 4096, 100_000])
                fill = chance.choice([bytes(length), chance.randbytes(length), b"\xff" * length])
                slab.change(path, chance.randrange(size), fill)
            if chance.random() < 0.1:
                os.truncate(path, chance.randrange(path.stat().st_size + 100_000))
        tier, region = open_slab(slab.path, NUM_SLOTS)
        found = slab.universe.check(tier, region, reset_every=4)
        survived += sum(status == Status.OK for status in found.values())
        tier.close()
        slab.mend()
    report(f"{turns} rounds, {survived} blocks compared, none wrong")
