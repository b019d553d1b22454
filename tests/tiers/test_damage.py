"""Damaged files: what is wrong is never served, and its neighbours are unhurt."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.tiers import State, Status
from kvoffload.tiers.generation import Generation
from kvoffload.tiers.local.slab import Verdict, verify_slab
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

    def copy(self, path: Path, size: int, left: int, right: int, both: bool = True) -> None:
        """Put what lies in a slot into another one, and with `both` that one's there."""
        start = HEADER_BYTES if path == self.table else 0
        places = start + size * left, start + size * right
        found = [self.bytes_at(path, place, size) for place in places]
        self.change(path, places[1], found[0])
        if both:
            self.change(path, places[0], found[1])

    def flip(self, path: Path, bit: int) -> None:
        (byte,) = self.bytes_at(path, bit // 8, 1) or b"\0"
        self.change(path, bit // 8, bytes([byte ^ 1 << bit % 8]))

    def forge(self, slot: int, chance: random.Random) -> None:
        """Write a seal that is right in itself, and not that of the block under its key."""
        block = self.bytes_at(self.blocks, slot * BLOCK_BYTES, BLOCK_BYTES)
        key = chance.choice(self.universe.keys)
        own = Seal.of(NAMESPACE.fingerprint, key, block)
        other = Seal.of(NAMESPACE.fingerprint, b"unheard of", block)
        forged = (
            (other, 0),
            (other._replace(key=key), 0),  # as if it had been stored under this key
            (own._replace(sum=own.sum ^ 1), 0),
            (own._replace(nbytes=BLOCK_BYTES - 1), 0),
            (own, 1),  # of another generation
            (Seal.of(bytes(16), key, block), 0),  # of another model
        )
        seal, generation = chance.choice(forged)
        self.change(self.table, record_offset(slot), seal.pack(generation))

    def damage(self, chance: random.Random) -> None:
        """Do one thing to the files."""
        slot, other = chance.sample(range(NUM_SLOTS), 2)
        path, size = chance.choice([(self.blocks, BLOCK_BYTES), (self.table, SEAL_BYTES)])
        kind = chance.choice(["flip", "swap", "move", "copy", "forge", "stretch", "cut"])
        if kind == "flip":
            start = HEADER_BYTES if path == self.table else 0
            self.flip(path, 8 * (start + slot * size) + chance.randrange(8 * size))
        elif kind == "swap":
            self.copy(path, size, slot, other)
        elif kind in ("move", "copy"):
            for each in ((self.blocks, BLOCK_BYTES), (self.table, SEAL_BYTES)):
                self.copy(*each, slot, other, both=kind == "move")
        elif kind == "forge":
            self.forge(slot, chance)
        elif kind == "stretch":
            length = chance.choice([1, 64, 4096, 100_000])
            fill = chance.choice([bytes(length), chance.randbytes(length), b"\xff" * length])
            self.change(path, chance.randrange(path.stat().st_size + 1), fill)
        elif chance.random() < 0.3:
            os.truncate(path, chance.randrange(path.stat().st_size + 100_000))

    def expected(self) -> dict[bytes, Status]:
        """Return what is to be found, by the files, the stamps and the seals of these tests."""
        found = dict.fromkeys(self.universe.keys, Status.MISS)
        header = Header.unpack(self.bytes_at(self.table, 0, HEADER_BYTES))
        if header is None:
            return found

        def stamp_of(slot: int) -> int:
            data = self.bytes_at(self.table, header.stamps_offset + 8 * slot, 8)
            return int.from_bytes(data, "little", signed=True) if len(data) == 8 else 0

        for slot in sorted(range(NUM_SLOTS), key=stamp_of):  # of two with one key the last counts
            record = self.bytes_at(self.table, record_offset(slot), SEAL_BYTES).ljust(SEAL_BYTES)
            key, nbytes = record[8 : 8 + record[3]], BLOCK_BYTES
            seal = Seal(key, nbytes, int.from_bytes(record[48:56], "little"))
            if key in found and record == seal.pack(0):
                block = self.bytes_at(self.blocks, slot * nbytes, nbytes).ljust(nbytes, b"\0")
                is_right = seal == Seal.of(NAMESPACE.fingerprint, key, block)
                found[key] = Status.OK if is_right else Status.CORRUPT
        return found

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


def test_whatever_is_done_to_the_files(slab: Slab, seed: int) -> None:
    """Flip, swap, copy, forge, overwrite and cut at random. Stated: 2,000 rounds.

    A block is served where the seal in its slot is right, is corrupt where only the seal is whole,
    and is not there otherwise.
    """
    chance = random.Random(seed)
    turns, seen = rounds(2000), Counter()
    for _ in range(turns):
        for _ in range(chance.choice([1, 2, 10, 40])):
            slab.damage(chance)
        expected = slab.expected()
        found = slab.served()
        assert found == expected
        seen.update(status.name for status in found.values())
        slab.mend()
    assert len(seen) == 3
    report(f"{turns} rounds, every block compared: {dict(seen)}")


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


def test_a_file_that_is_cut_while_the_tier_is_open(tmp_path: Path) -> None:
    universe = Universe(32)
    tier, region = open_slab(tmp_path, 32)
    universe.put(tier, region)
    os.truncate(tier.folder / "blocks.dat", 20 * BLOCK_BYTES + 100)
    os.truncate(tier.folder / "slots.tbl", 0)
    statuses = [*universe.check(tier, region, reset_every=1).values()]
    assert statuses == [Status.OK] * 20 + [Status.CORRUPT] * 12
    tier.close()


# -- tables from strangers -----------------------------------------------------------------------


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
