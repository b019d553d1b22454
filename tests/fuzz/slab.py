"""Bytes as damage to the files of a slab, which is then looked at, verified and opened warm.

There is one genuine slab, and two more to take pieces from: itself before everything was forgotten,
and one of another namespace that has other bytes under the same keys. The first byte says nothing,
the next two whether blocks are staged, and the number of slots. Then each step of the damage is a
byte that picks its kind, and what that kind needs: a file, a position, bytes. A sum is made right
again where a step says so, so that what lies behind it is reached too; the sum of a block's own
bytes never is, since nothing but that tells what is right.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvoffload.testing.tiers import PATIENCE_S, block_bytes_of
from kvoffload.tiers import FileTier, Namespace, Region, Status, TierError
from kvoffload.tiers.local.slab import find_slabs, verify_slab
from kvoffload.tiers.local.slab.layout import BLOCKS, NAMESPACE, TABLE, Header, record_offset
from kvoffload.tiers.seal import SEAL_BYTES, xxh3_64

from .scratch import scratch

BLOCK_BYTES = 4096
NUM_SLOTS = 6
MAX_SLOTS = 12
MAX_STEPS = 24
MEMORY = 2 * 2**20
"""Bytes of Python's memory that a look at files of some 40 KiB takes at most."""

OURS, OTHERS = Namespace("ours", BLOCK_BYTES), Namespace("others", BLOCK_BYTES)
KEYS = [b"a", b"key of sixteen b", b"k" * 40, b"k" * 41, b"\0", b"\0" * 64, b"new", b"newer"]
STORED, NEW = KEYS[:5], KEYS[5:]

FILES = (TABLE, BLOCKS, NAMESPACE)
UNITS = (1, 8, SEAL_BYTES, 2048, 4096)
SIZES = (1, 8, SEAL_BYTES, 80, 512, 4096, 2**20)
FIELDS = ((0, 8), (8, 4), (12, 4), (16, 16), (32, 8), (40, 8), (48, 8), (56, 4), (60, 8))
HEADER_SUM = 316
SEAL_SUM = 56
COPIES = (0, 2048)

Files = dict[str, bytearray]


def data_of(key: bytes, namespace: Namespace = OURS) -> bytes:
    """Return the only bytes that a namespace ever has under a key."""
    return block_bytes_of(namespace.model.encode() + key, BLOCK_BYTES)


class Opened:
    """A slab that is open, with a region for one block of each key."""

    def __init__(self, path: Path, namespace: Namespace, slots: int, **options: Any) -> None:
        self.namespace = namespace
        self.region = Region.allocate(len(KEYS), BLOCK_BYTES)
        self.tier = FileTier(
            path, slots * BLOCK_BYTES, threads=1, namespace=namespace, staging_bytes=0, **options
        )
        self.tier.attach(self.region)

    def put(self, keys: Sequence[bytes]) -> None:
        """Store what the keys stand for, one by one."""
        for key in keys:
            self.region.write(0, data_of(key, self.namespace))
            self._wait(self.tier.put([key], [0]))

    def get(self, keys: Sequence[bytes]) -> list[Status]:
        """Load blocks, all at once, and compare each that is served."""
        self.tier.health(reset=True)
        self.region.array[:] = 0xA5
        statuses = self._wait(self.tier.get(keys, range(len(keys))))
        for place, (key, status) in enumerate(zip(keys, statuses, strict=True)):
            if status == Status.OK and self.region.read(place) != data_of(key, self.namespace):
                raise AssertionError(f"WRONG BYTES under {key!r}")
            if status not in (Status.OK, Status.MISS, Status.CORRUPT):
                raise AssertionError(f"{status!r} under {key!r}")
        return statuses

    def _wait(self, job: int) -> list[Status]:
        if not self.tier.wait([job], PATIENCE_S):
            raise AssertionError(f"a job that does not end after {PATIENCE_S} s")
        (done,) = self.tier.poll()
        return [Status(status) for status in done.status.tolist()]


@contextmanager
def opened(*args: Any, **options: Any) -> Iterator[Opened]:
    """Open a slab and close it."""
    slab = Opened(*args, **options)
    try:
        yield slab
    finally:
        slab.tier.close()


@cache
def originals() -> dict[str, dict[str, bytes]]:
    """Return the files of the three slabs; their generations are always the same."""
    found = {}
    with scratch() as folder:
        for name, path, namespace, keys in (
            ("before", "ours", OURS, KEYS),
            ("now", "ours", OURS, STORED),
            ("other", "others", OTHERS, KEYS),
        ):
            generation = name if name == "before" else ""
            with opened(Path(folder, path), namespace, NUM_SLOTS, generation=generation) as slab:
                slab.put(keys)
            files = {file: Path(slab.tier.folder, file).read_bytes() for file in FILES}
            found[name] = files
    return found


class Damage:
    """The bytes that are left, and the files that they change."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)
        self.files: Files = {name: bytearray(f) for name, f in originals()["now"].items()}

    def byte(self) -> int:
        """Return the next byte; at the end, 0."""
        return next(self._bytes, 0)

    def take(self, count: int) -> bytes:
        """Return so many bytes; at the end, zeros."""
        return bytes(self.byte() for _ in range(count))

    def steps(self) -> int:
        """Do the damage; return the steps that it took."""
        for number in range(MAX_STEPS):
            kind = next(self._bytes, None)
            if kind is None:
                return number
            KINDS[kind % len(KINDS)](self)
        return MAX_STEPS

    def place(self) -> tuple[str, int]:
        """Return a file, and a position in it or a little behind its end."""
        pick = self.byte()
        name, unit = FILES[pick % 3], UNITS[pick // 3 % len(UNITS)]
        position = int.from_bytes(self.take(2), "little") * unit
        return name, position % (len(self.files.get(name, b"")) + 4097)

    def write(self, name: str, position: int, data: bytes) -> None:
        """Write to a file, which grows where need be; zeros are between its end and the bytes."""
        file = self.files.setdefault(name, bytearray())
        file.extend(bytes(max(0, position - len(file))))
        file[position : position + len(data)] = data

    def overwrite(self) -> None:
        """Write bytes of the input."""
        name, position = self.place()
        self.write(name, position, self.take(self.byte() % 33))

    def flip(self) -> None:
        """Flip a bit."""
        name, position = self.place()
        file, bit = self.files.get(name, bytearray()), 1 << self.byte() % 8
        if position < len(file):
            file[position] ^= bit

    def cut(self) -> None:
        """Cut a file off, or put zeros behind its end."""
        name, position = self.place()
        file = self.files.get(name, bytearray())
        self.write(name, position, b"")
        del file[position:]

    def copy(self) -> None:
        """Write a piece of one of the slabs somewhere."""
        files = self.source()
        name, start = self.place()
        size = SIZES[self.byte() % len(SIZES)]
        piece = bytes(files.get(name, b"")[start : start + size])
        self.write(*self.place(), piece)

    def replace(self) -> None:
        """Take a whole file of one of the slabs."""
        files, name = self.source(), FILES[self.byte() % 3]
        self.files[name] = bytearray(files.get(name, b""))

    def source(self) -> dict[str, Any]:
        """Return the files of one of the slabs, or those that are being damaged."""
        pick = self.byte() % 4
        return self.files if pick == 3 else originals()[("now", "before", "other")[pick]]

    def remove(self) -> None:
        """Remove a file."""
        self.files.pop(FILES[self.byte() % 3], None)

    def header_field(self) -> None:
        """Set a field of the header, and the sums of both copies."""
        start, size = FIELDS[self.byte() % len(FIELDS)]
        value = self.take(size)
        for copy in COPIES:
            self.write(TABLE, copy + start, value)
            self.sum(copy, HEADER_SUM, 0)

    def seal_field(self) -> None:
        """Write somewhere in a seal, and make its own sum right."""
        start = record_offset(self.byte() % MAX_SLOTS)
        place = self.byte() % SEAL_SUM
        value = self.take(self.byte() % 9)[: SEAL_SUM - place]
        self.write(TABLE, start + place, value)
        header = Header.unpack(bytes(self.files[TABLE][: record_offset(0)]))
        self.sum(start, SEAL_SUM, header.generation.number if header else 0)

    def sum(self, start: int, size: int, seed: int) -> None:
        """Write the sum of so many bytes of the table behind them."""
        fields = bytes(self.files[TABLE][start : start + size]).ljust(size, b"\0")
        self.write(TABLE, start, fields + struct.pack("<Q", xxh3_64(fields, seed)))

    def stamp(self) -> None:
        """Write the stamp of a slot."""
        start = record_offset(0) + 4096
        self.write(TABLE, start + 8 * (self.byte() % MAX_SLOTS), self.take(8))


KINDS: tuple[Callable[[Damage], None], ...] = (
    Damage.overwrite,
    Damage.flip,
    Damage.cut,
    Damage.copy,
    Damage.replace,
    Damage.remove,
    Damage.header_field,
    Damage.seal_field,
    Damage.stamp,
)


@contextmanager
def little_memory() -> Iterator[None]:
    """Raise if more memory is taken than files of this size can need.

    CPython 3.11 itself keeps some kilobytes each time that tracing ends.
    """
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if taken > MEMORY:
        raise AssertionError(f"{taken} bytes of memory for a look at a small slab")


def look(folder: Path) -> None:
    """List and verify a slab, as the command does; raise on what is not documented."""
    try:
        (found,) = find_slabs(folder)
    except TierError:
        if (folder / TABLE).exists():
            raise
        return
    try:
        verdict = verify_slab(folder)
    except (TierError, OSError) as error:
        if found.header is not None and (folder / BLOCKS).exists():
            raise AssertionError("a slab with a header that cannot be verified") from error
        return
    if verdict.sound + len(verdict.corrupt) != found.num_blocks:
        raise AssertionError(f"{verdict} of {found.num_blocks} blocks")


def run_slab(data: bytes) -> int:
    """Damage a slab as the bytes say, open it and compare; return how many blocks it served."""
    damage = Damage(data)
    damage.byte()
    options = {"staged": bool(damage.byte() & 1)}
    num_slots = 1 + (damage.byte() + NUM_SLOTS - 1) % MAX_SLOTS
    steps = damage.steps()
    with scratch() as path:
        folder = Path(path, OURS.fingerprint.hex())
        folder.mkdir(mode=0o700)
        for name, content in damage.files.items():
            (folder / name).write_bytes(content)
        with little_memory():
            look(folder)
        with opened(Path(path), OURS, num_slots, **options) as slab:
            first = slab.get(KEYS)
            if not steps and num_slots >= NUM_SLOTS and first.count(Status.OK) != len(STORED):
                raise AssertionError(f"a whole slab serves {first}")
            slab.get(KEYS)
        served = sum(status == Status.OK for status in first)
        kept = first
        for new in (NEW, ()):
            with opened(Path(path), OURS, num_slots, **options) as slab:
                found = slab.get(KEYS)
                for key, status, before in zip(KEYS, found, kept, strict=True):
                    if before == Status.OK != status:
                        raise AssertionError(f"{key!r}, once served, is {status!r}")
                slab.tier.touch(KEYS)
                slab.put(new)
                kept = slab.get(KEYS)
    return served
