"""The slab tier: blocks in the slots of one large file on a local disk.

Structure
    ``layout`` describes the files, ``files`` opens them, the pool of threads moves blocks and
    writes their seals, a thread writes new generations, and the index assigns slots to blocks.
Invariants
    No method touches a file in the caller's thread, except to open it. A slot's seal is cleared
    before its bytes are written, and written after them: a killed process leaves blocks that are
    complete or have no seal. Only a new generation is synced: after a power cut, bytes and seals
    may be of any age, and match only if they are right.
Cost
    Per block: the index's own cost, a share of one system call for the bytes and of one or two for
    the seals, and one pass over the bytes for the sum.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvoffload import CachePolicy
from kvoffload._checks import check_bool
from kvoffload._sizes import check_size, parse_size
from kvoffload.tiers.base import Status
from kvoffload.tiers.engine.jobs import Jobs
from kvoffload.tiers.engine.tier import LONGEST_DEADLINE_S, ComposedTier
from kvoffload.tiers.folder import check_path
from kvoffload.tiers.local.index import Index, Policy, check_num_slots
from kvoffload.tiers.metrics import write_line
from kvoffload.tiers.namespace import Namespace, check_namespace
from kvoffload.tiers.native import io
from kvoffload.tiers.options import STAGED, Readers, TierKeywords, TierOptions, flag, read_options
from kvoffload.tiers.region import Region, round_up, staging_buffers
from kvoffload.tiers.seal import SEAL_BYTES

from .files import SlabFiles, check_space
from .layout import STAMP_BYTES, record_offset

if TYPE_CHECKING:
    from typing_extensions import Unpack

STAMPS_PER_PAGE = 512
STAMPS_EVERY_S = 1.0
"""Minimum seconds between writes of stamps: a killed process loses the uses since."""
LARGEST_STAMP = 2**62
"""Largest valid stamp; a larger one is damage and would leave no room to count on."""
STAMP_WRITES = 64
"""Most pieces of stamps that are written at once."""
FORGET_S = 1.0
"""Seconds that `FileTier.forget` waits for the disk."""
GRACE_S = 0.1
"""Least seconds that a call under way has at the end."""


class FileTier(ComposedTier):
    """A tier in one large file on a local disk, whose size never changes.

    Parameters
    ----------
    path : str or Path
        A folder, made if it is missing. The slab is a folder in it that is named after the
        namespace's fingerprint.
    capacity_bytes : int or str
        Bytes of ``blocks.dat``, as a number or as text such as ``"2TB"``; they are allocated at
        once, and a remainder smaller than a block is not used. The table takes another 72 bytes per
        block. A slab that was made with another capacity keeps the blocks within the new one.
    policy : str, type or CachePolicy
        The policy that decides which blocks stay, as ``cache_policy`` of `CPUOffloadingManager`.
        One with admission may decline blocks.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block.
    staged : bool
        Whether blocks move through buffers of the tier: a hanging disk then never holds the
        region's memory, at the cost of a copy. By default they move directly if the file system
        supports ``O_DIRECT`` and the region's blocks are multiples of 4096 bytes at multiples of
        4096.
    **keywords
        The options of `TierOptions`, whose sizes may be text; by default ``threads=8`` and
        ``name="disk"``.

    Attributes
    ----------
    folder : Path
        Folder of the slab.
    num_slots : int
        Blocks that it has room for.
    num_restored : int
        Blocks that were found when it was opened.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    TierInUseError
        If another process, or another object, has the slab open.
    TierSpaceError
        If the file system has too little space; nothing is left behind.
    TierError
        If a file cannot be made or opened.
    """

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int | str,
        policy: str | type[CachePolicy] | CachePolicy = "lru",
        *,
        namespace: Namespace,
        staged: bool = False,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        path = check_path(path)
        check_namespace(namespace)
        slot_bytes = round_up(namespace.block_bytes)
        capacity_bytes = check_size("capacity_bytes", capacity_bytes, slot_bytes)
        num_slots = check_num_slots(capacity_bytes, slot_bytes)
        options = TierOptions.of(keywords, name="disk", threads=8)
        check_space(path, namespace, num_slots)
        staged = check_bool("staged", staged)
        jobs = Jobs(options, namespace.block_bytes)
        medium = _Slab(jobs, namespace, policy, num_slots, path, staged=staged)
        try:
            medium.restore_blocks()
            self.num_restored = medium.num_restored
            self.folder = medium.folder
            self.num_slots = num_slots
            super().__init__(medium, num_slots * namespace.block_bytes)
        except BaseException:
            medium.leave()
            raise


class _Slab(Index):
    """The files of a slab, their stamps of use, and the generation in their header."""

    notes_uses = True

    def __init__(
        self,
        jobs: Jobs,
        namespace: Namespace,
        policy: Policy,
        num_slots: int,
        path: Path,
        *,
        staged: bool,
    ) -> None:
        super().__init__(jobs, namespace, policy, num_slots)
        self._staged = staged
        self._sums = np.zeros(num_slots, np.uint64)
        self._written = np.zeros(num_slots, np.uint8)
        self._files = SlabFiles(path, namespace, num_slots, jobs.generation)  # from now on locked
        self.folder = self._files.folder
        self.place = str(self.folder)
        self.num_restored = 0
        self._stamps = self._files.stamps
        self._stamp_clock = 0
        self._stale_stamps: set[int] = set()  # pages that differ from the file's
        self._stamps_written = time.monotonic()
        self._stamp_writes = 0  # under way
        self._written_header = self._files.header
        self._header_lock = threading.Lock()  # held while a thread writes the header
        self._has_threads = False
        self._to_clear: list[int] = []  # slots of blocks dropped before there are threads

    # -- opening -----------------------------------------------------------------------------

    def restore_blocks(self) -> None:
        """Fill the index with the blocks on the disk, in order of use."""
        slots, keys, sums, others = io.valid_records(
            self._files.records, self.namespace.block_bytes, self.jobs.generation.number
        )
        if others:
            line = "%s: seals that are damaged, or of a forgotten generation: %d"
            write_line(logging.WARNING, line, self.folder, others)
            self._written[:] = 1  # a put clears these seals, too, before it writes bytes
        self._files.records = memoryview(b"")
        self._written[slots] = 1
        self._sums[slots] = sums
        stamps = self._stamps[slots]
        self._stamp_clock = int(stamps.max(initial=0))
        order = np.argsort(stamps, kind="stable")
        if self._stamp_clock > LARGEST_STAMP:
            self._count_stamps_anew(slots[order])
        # A power cut, or a return to a generation, may leave two slots with one key: the one used
        # last counts, and the other must not come back when that is discarded.
        latest: dict[bytes, int] = {}
        for position in order.tolist():
            if keys[position] in latest:
                self._to_clear.append(latest.pop(keys[position]))
            latest[keys[position]] = int(slots[position])
        self.num_restored = self.restore(list(latest), np.array([*latest.values()], np.int64))

    def open_pool(self, region: Region) -> Any:
        files, options = self._files, self.jobs.options
        reason = None
        if self._staged:
            reason = "as it was asked for"
        elif not files.has_direct:
            reason = "the file system has no O_DIRECT"
        elif not region.aligned or self.namespace.block_bytes != files.header.slot_bytes:
            reason = "the region's blocks are not aligned to 4096 bytes"
        self.direct = reason is None
        if reason is not None and not self._staged:
            write_line(logging.WARNING, "tier %r copies blocks: %s", options.name, reason)
        store = io.FileStore(
            files.data_fd,
            files.table_fd,
            direct=self.direct,
            block_bytes=self.namespace.block_bytes,
            slot_bytes=files.header.slot_bytes,
            records_offset=record_offset(0),
            fingerprint=self.namespace.fingerprint,
            sums=self._sums,
            written=self._written,
        )
        buffers = None
        if not self.direct:
            buffers = staging_buffers(options.staging_bytes, self.namespace.block_bytes)
        return io.Pool(region, store, options.threads, buffers, ack_copied=options.ack_copied)

    def attached(self) -> None:
        """Clear the seals of blocks that were dropped before there were threads."""
        self._has_threads = True
        slots, self._to_clear = self._to_clear, []
        self.clear(slots)

    # -- stamps ------------------------------------------------------------------------------

    def used(self, slots: npt.NDArray[np.int64]) -> None:
        """Stamp blocks that were used; the last of `slots` is the most recent."""
        count = len(slots)
        self._stamps[slots] = np.arange(self._stamp_clock + 1, self._stamp_clock + 1 + count)
        self._stamp_clock += count
        self._stale_stamps.update((slots // STAMPS_PER_PAGE).tolist())

    def tend(self) -> None:
        """Write stamps from time to time."""
        if (
            self._stale_stamps
            and not self._stamp_writes
            and time.monotonic() - self._stamps_written >= STAMPS_EVERY_S
        ):
            self._write_stamps(STAMP_WRITES)

    def _write_stamps(self, most: int | None) -> None:
        """Queue the write of changed stamps, in at most `most` pieces."""
        stale = self._stale_stamps
        starts = sorted(page for page in stale if page - 1 not in stale)
        for start in starts[:most]:
            stop = start
            while stop in stale:
                stale.discard(stop)
                stop += 1
            first, last = start * STAMPS_PER_PAGE, min(stop * STAMPS_PER_PAGE, self._num_slots)
            offset = self._files.header.stamps_offset + first * STAMP_BYTES
            self._stamp_writes += 1
            data = self._stamps[first:last].astype("<i8").tobytes()
            self.jobs.chore(self._stamps_done, offset, data)
        self._stamps_written = time.monotonic()

    def _stamps_done(self, status: int) -> None:  # noqa: ARG002
        self._stamp_writes -= 1

    def _count_stamps_anew(self, slots: npt.NDArray[np.int64]) -> None:
        """Give slots the stamps from 1 on, in this order, and queue the write of all stamps."""
        self._stamps[:] = 0
        self._stamps[slots] = np.arange(1, len(slots) + 1)
        self._stamp_clock = len(slots)
        self._stale_stamps.update(range(-(-self._num_slots // STAMPS_PER_PAGE)))

    # -- seals -------------------------------------------------------------------------------

    def clear(self, slots: list[int]) -> None:
        """Clear the seals of slots."""
        if not self._has_threads:
            self._to_clear += slots
            return
        for slot in slots:
            done = partial(self._seal_done, slot)
            self.jobs.chore(done, record_offset(slot), bytes(SEAL_BYTES))

    def not_stored(self, slots: npt.NDArray[np.int64]) -> None:
        """Clear the seals of blocks that were evicted for blocks that were then not written."""
        self.clear(slots[self._written[slots] == 1].tolist())

    def _seal_done(self, slot: int, status: int) -> None:
        if status == Status.UNAVAILABLE:  # the pool closes first
            self.clear([slot])
        elif status != Status.OK:
            self.jobs.say("could not clear the seals of blocks that were dropped")

    # -- forgetting --------------------------------------------------------------------------

    def forget(self) -> None:
        """Change the generation, which makes every seal invalid; `confirm` writes the header."""
        super().forget()
        self._files.change_generation(self.jobs.generation)

    def confirm(self) -> bool:
        if not self._is_header_written():
            _ends(self._write_header, time.monotonic() + FORGET_S)
        if self._is_header_written():
            return True
        write_line(
            logging.ERROR,
            "tier %r may remember after a restart: its disk did not confirm",
            self.jobs.options.name,
        )
        return False

    def _is_header_written(self) -> bool:
        return self._written_header is self._files.header

    def _write_header(self) -> None:
        """Write the newest header, after a thread that writes an earlier one."""
        with self._header_lock:
            if not self._is_header_written():
                with contextlib.suppress(OSError):
                    self._written_header = self._files.write_header()

    # -- the end -----------------------------------------------------------------------------

    def before_close(self) -> None:
        self._write_stamps(None)
        self._has_threads = False

    def close(self, until: float, *, has_ended: bool) -> bool:
        """Close the files; a header that is not on the disk is tried once more.

        A second call finishes a first one that an exception or a hanging disk has ended.
        """
        if self._files.is_closed:
            return has_ended
        until = max(time.monotonic() + GRACE_S, min(until, time.monotonic() + LONGEST_DEADLINE_S))
        if self._to_clear:
            has_ended &= _ends(partial(self._clear_seals, until), until)
        if not self._is_header_written() or self._header_lock.locked():
            has_ended &= _ends(self._write_header, until)
        if has_ended:
            self._files.close()
        return has_ended

    def _clear_seals(self, until: float) -> None:
        with contextlib.suppress(OSError):  # a log line at the end would not help
            for slot in self._to_clear:
                if time.monotonic() < until:
                    self._files.write_table(record_offset(slot), bytes(SEAL_BYTES))

    def leave(self) -> None:
        self._files.close()

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "restored": self.num_restored}


def _ends(call: Callable[[], None], until: float) -> bool:
    """Make a call that may hang; return whether it has returned by then."""
    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there is no thread
        call()
        return True
    thread.join(max(GRACE_S, until - time.monotonic()))
    return not thread.is_alive()


_READERS: Readers = {
    "capacity": ("capacity_bytes", parse_size),
    "policy": ("policy", str),
    "staged": ("staged", flag),
    **STAGED,
}


def open_slab(place: str, namespace: Namespace, /, **options: str) -> FileTier:
    """Open ``slab:/nvme/kv?capacity=2TB``; see `kvoffload.tiers.open_tier`."""
    if not place:
        raise ValueError("a slab must have a folder, as slab:/nvme/kv")
    return FileTier(place, namespace=namespace, **read_options(options, _READERS))
