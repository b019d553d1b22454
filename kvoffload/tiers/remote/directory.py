"""A directory that processes and machines share: NFS, Lustre, a volume of several engines.

The directory has a folder per namespace, named after its fingerprint:

=========================== ====================================================================
``namespace.json``          what the bytes mean
``<number>/<hh>/<key>.kv``  a block, and a page of 4096 bytes that begins with its seal; the number
                            of its generation has 16 hex digits; ``hh`` are two hex digits of a sum
                            of the key, the name is the stored key in hex
``<number>/<hh>/*.tmp``     a block that is being written, or what lay in place of one
``sweep.lock``              locked and renewed by who sweeps; its time of change is that of the
                            last sweep
=========================== ====================================================================

Structure
    A block is written to a new file of one writer (``O_EXCL``) and then linked to its name, which
    so appears with all its bytes. Without support for links it is renamed. A thread of the tier
    sweeps from time to time: it removes the oldest blocks, of all generations, until the others
    fit, and files of dead writers. A lock ensures that one process at a time sweeps.
Invariants
    A name appears with all its bytes written. Nothing is synced: after a server loses power, a
    block matches its seal only if it is right. Links, pipes and files of any size that strangers
    put there are opened without waiting, and never read beyond the length of a block.
Cost
    A put checks whether the block exists, and makes five further system calls if it does not; a get
    is an open, a stat, a read and a close, of up to 16 blocks without the interpreter's lock.
    A sweep examines every file, and takes 8 bytes of memory per block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from binascii import hexlify
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvoffload._sizes import check_size, parse_size
from kvoffload.errors import describe
from kvoffload.tiers.base import Status
from kvoffload.tiers.deletion import Deleted
from kvoffload.tiers.engine.contract import Block
from kvoffload.tiers.folder import (
    Folder,
    check_path,
    make_folders,
    status_of,
    temporary_name,
    transfer,
)
from kvoffload.tiers.generation import NUMBER_BYTES
from kvoffload.tiers.namespace import (
    FINGERPRINT_BYTES,
    NAMESPACE,
    Namespace,
    check_namespace,
    fields_in,
    is_hex,
)
from kvoffload.tiers.native import io
from kvoffload.tiers.options import (
    STAGED,
    Readers,
    TierKeywords,
    TierOptions,
    read_options,
    whole_number,
)
from kvoffload.tiers.seal import SEAL_BYTES, xxh3_64

from .store import ForeignNamespaceError, RemoteStore
from .sweeper import Sweeper
from .tier import RemoteTier

if TYPE_CHECKING:
    from typing_extensions import Unpack

PAGE_BYTES = 4096
RENEW_S = 3600.0
"""Minimum seconds between renewals of a used block's time of change."""
SWEEP_S = 60.0
VISIT_S = 1.0
"""Seconds after which the folder is opened and compared again."""
STOP_S = 0.2
"""Seconds that closing waits for a sweep to stop."""
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})


class DirectoryStore(RemoteStore):
    """Blocks in files below a directory."""

    blocks_per_call = 16
    keys_per_query = 64
    touch_s = RENEW_S
    visit_s = VISIT_S

    def __init__(self, namespace: Namespace, path: Path, max_blocks: int, sweep_s: float) -> None:
        super().__init__(namespace)
        self.place = str(path)
        self.directory = path.absolute()  # it stays if the process changes its own
        self.folder = self.directory / self.fingerprint.hex()
        self.sweeper = Sweeper(self.open_namespace, max_blocks, sweep_s, self.say)
        self.on_written = self.sweeper.count_written
        self._opened: Folder | None = None  # the namespace's, since its last comparison
        self._blocks: tuple[Folder, int, Folder] | None = None  # (namespace, generation, folder)
        self._is_open_to_all = False

    def start(self) -> None:
        self.sweeper.start()

    def stop(self) -> None:
        self.sweeper.stop(STOP_S)

    def take_evicted(self) -> list[tuple[int, bytes]]:
        return self.sweeper.take_swept()

    def close(self) -> None:
        """Close the folders."""
        self._opened = self._blocks = None

    # -- the namespace -----------------------------------------------------------------------

    def open_namespace(self, *, make: bool = False) -> Folder | None:
        """Return the open folder of the namespace, whose JSON matches; None if it is missing.

        With `make`, missing parts are made. An incomplete JSON counts as missing: its writer or the
        file server ended.

        Raises
        ------
        ForeignNamespaceError
            If the JSON is that of another namespace.
        OSError
            If the folder is not a folder, or cannot be opened.
        """
        name = self.fingerprint.hex()
        try:
            if make:
                make_folders(self.directory)
            directory = Folder.at(self.directory)
            folder = directory.make(name) if make else directory.below(name)
        except FileNotFoundError:
            if make:
                raise
            return None
        except NotADirectoryError:
            self.say("is refused: a link or a file is in the place of its folder", logging.ERROR)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        if os.fstat(folder.fd).st_mode & stat.S_IWOTH and not self._is_open_to_all:
            self._is_open_to_all = True
            self.say("has a folder that everyone can write to, and could put wrong blocks in")
        if not self.is_ours(folder.read(NAMESPACE, self.json_bytes - 1)):
            if not make:
                return None
            folder.write(NAMESPACE, self.namespace.json.encode("ascii"))
        return folder

    def visit(self) -> None:
        self._opened = cast("Folder", self.open_namespace(make=True))

    # -- blocks ------------------------------------------------------------------------------

    def _folder_of(self, key: bytes, generation: int, *, make: bool = False) -> Folder:
        """Return the folder of a block."""
        name = f"{_bucket_of(key):02x}"
        blocks = self._open_blocks(generation, make=make)
        if not make:
            return blocks.below(name)
        try:
            return blocks.make_in_place(name)
        except FileNotFoundError:  # the generation's folder was removed
            self._blocks = None
            return self._open_blocks(generation, make=True).make_in_place(name)

    def _open_blocks(self, generation: int, *, make: bool) -> Folder:
        namespace = self._opened
        if namespace is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        known = self._blocks
        if known is None or known[0] is not namespace or known[1] != generation:
            name = f"{generation:016x}"
            folder = namespace.make_in_place(name) if make else namespace.below(name)
            self._blocks = known = (namespace, generation, folder)
        return known[2]

    def _is_block(self, found: os.stat_result) -> bool:
        is_file = stat.S_ISREG(found.st_mode)
        return is_file and found.st_size == self.content_bytes + PAGE_BYTES

    def find(self, run: Sequence[Block], generation: int) -> None:
        for block in run:
            try:
                found = self._folder_of(block.key, generation).stat(_name(block.key))
                block.status = Status.OK if self._is_block(found) else Status.MISS
            except OSError as error:
                block.status = self._meaning_of(error)

    def fetch(self, run: Sequence[Block], generation: int) -> None:
        try:
            folder = self._open_blocks(generation, make=False)
        except OSError as error:
            for block in run:
                block.status = self._meaning_of(error)
            return
        paths = [b"%02x/%b.kv" % (_bucket_of(block.key), hexlify(block.key)) for block in run]
        views = [block.views[0] for block in run]
        found = io.read_files(folder.fd, paths, views, self.content_bytes + PAGE_BYTES)
        old = time.time() - RENEW_S
        for block, (status, changed) in zip(run, found, strict=True):
            block.status = self._meaning_of(OSError(-status, "")) if status < 0 else status
            if status == Status.OK and changed < old:
                self.touch([block.key], generation)

    def store(self, run: Sequence[Block], generation: int) -> None:
        for block in run:
            try:
                self._store_one(block, generation)
                block.status = Status.OK
            except OSError as error:
                if error.errno in _GONE:  # a sweep has removed the folder meanwhile
                    block.status = Status.FAILED
                    continue
                block.status = self._meaning_of(error)

    def _store_one(self, block: Block, generation: int) -> None:
        folder, name = self._folder_of(block.key, generation, make=True), _name(block.key)
        try:
            found = folder.stat(name)
        except FileNotFoundError:
            pass
        else:
            if self._is_block(found):
                return
            folder.take_away(name)
        temporary = temporary_name(name[:-3])
        fd = folder.create(temporary)
        try:
            try:
                views = [block.views[0], memoryview(bytes(PAGE_BYTES - SEAL_BYTES))]
                if transfer(os.pwritev, fd, views, 0) < self.content_bytes + PAGE_BYTES:
                    raise OSError(errno.EIO, "the file system wrote nothing")
            finally:
                os.close(fd)  # NFS reports errors here
        except OSError:
            with contextlib.suppress(OSError):
                folder.unlink(temporary)
            raise
        with contextlib.suppress(FileExistsError):  # another writer's, of the same bytes
            folder.link(temporary, name)
        self.on_written()

    def drop(self, keys: Sequence[bytes], generation: int) -> None:
        for key in keys:
            try:
                self._folder_of(key, generation).take_away(_name(key))
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def touch(self, keys: Sequence[bytes], generation: int) -> None:
        for key in keys:
            name = _name(key)
            with contextlib.suppress(OSError):
                folder = self._folder_of(key, generation)
                if time.time() - folder.stat(name).st_mtime > RENEW_S:
                    os.utime(name, dir_fd=folder.fd, follow_symlinks=False)

    def _meaning_of(self, error: OSError) -> Status:
        """Return the status of one block; log an error unless the block is gone."""
        return Status.MISS if error.errno in _GONE else self.meaning(error)

    def status_of(self, error: Exception) -> Status:
        if isinstance(error, TimeoutError):
            return Status.TIMEOUT
        return status_of(error) if isinstance(error, OSError) else Status.FAILED


class DirectoryTier(RemoteTier):
    """A tier in a directory that several processes share, on one machine or on many.

    Parameters
    ----------
    path : str or Path
        The directory; it and its parents are made when first needed, accessible only to this user.
    capacity_bytes : int or str
        Most bytes of blocks of this namespace, by any writer, that a sweep leaves; each block takes
        another page of 4096 bytes. All tiers of a namespace should have the same capacity.
    namespace : Namespace
        The namespace of the bytes; its ``block_bytes`` is the size of a block.
    sweep_s : float
        Seconds between two sweeps, > 0, and possibly infinite. A tier that has written a sixteenth
        of the capacity since its last sweep sweeps earlier.
    **keywords
        The options of `TierOptions`, whose sizes may be text; by default ``threads=8`` and
        ``name="directory"``. This tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    The block with the oldest time of change leaves first; a hit renews it at most once an hour.
    Events of blocks that left come from the tier whose sweep removed them, of at most 100,000
    between two polls; its counter has as many.
    """

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int | str,
        *,
        namespace: Namespace,
        sweep_s: float = SWEEP_S,
        **keywords: Unpack[TierKeywords],
    ) -> None:
        path = check_path(path)
        if not isinstance(sweep_s, int | float) or not sweep_s > 0:  # type: ignore[redundant-expr]
            raise ValueError(f"sweep_s must be a number > 0, got {describe(sweep_s)}")
        options = TierOptions.of(keywords, name="directory", threads=8)
        block_bytes = check_namespace(namespace).block_bytes
        capacity_bytes = check_size("capacity_bytes", capacity_bytes, block_bytes)
        max_blocks = capacity_bytes // block_bytes
        sweep_s = float(min(sweep_s, threading.TIMEOUT_MAX))  # no thread can wait for longer
        self._files = DirectoryStore(namespace, path, max_blocks, sweep_s)
        self._sweeper = self._files.sweeper
        super().__init__(self._files, options, capacity_bytes)

    @property
    def folder(self) -> Path:
        """Folder of the namespace."""
        return self._files.folder

    def sweep(self) -> int | None:
        """Sweep now, in the caller's thread; the tier also sweeps by itself from time to time.

        Returns
        -------
        int or None
            Number of removed blocks; None if another process sweeps, nothing was stored yet, or the
            folder belongs to another namespace.

        Raises
        ------
        OSError
            If the directory cannot be read.
        RuntimeError
            If the tier is closed.
        """
        self._require_ready()
        try:
            return self._sweeper.sweep()
        except ForeignNamespaceError:
            return None


def _bucket_of(key: bytes) -> int:
    """Return the number of the folder that a block is in."""
    return xxh3_64(key) & 0xFF


def _name(key: bytes) -> str:
    return f"{key.hex()}.kv"


_READERS: Readers = {
    **STAGED,
    "capacity": ("capacity_bytes", parse_size),
    "sweep": ("sweep_s", whole_number),
}


def open_directory(place: str, namespace: Namespace, /, **options: str) -> DirectoryTier:
    """Open ``dir:/mnt/kv?capacity=2TB``; see `kvoffload.tiers.open_tier`."""
    if not place:
        raise ValueError("a directory must be given, as dir:/mnt/kv")
    return DirectoryTier(place, namespace=namespace, **read_options(options, _READERS))


class Kept(NamedTuple):
    """The blocks of one generation of a namespace, in a directory."""

    fingerprint: str  # of the namespace, the name of its folder
    namespace: dict[str, Any]  # from its JSON; empty if that cannot be read
    generation: str  # the number in 16 hex digits; zeros for the one without a name
    blocks: int
    disk_bytes: int


def find_blocks(path: str | Path) -> Iterator[Kept]:
    """Yield what a directory has, by namespace and generation; links are not followed.

    Raises
    ------
    OSError
        If a folder cannot be read.
    """
    for fingerprint, namespace, generation in _generations(path):
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            found = _count(namespace, generation)
            yield Kept(fingerprint, fields_in(namespace), generation, *found)


def delete_blocks(url: str, _options: Mapping[str, str], number: int | None) -> Iterator[Deleted]:
    """Delete the blocks in a directory, those of a generation or all; see ``deletion``.

    Nothing but the folders of generations is removed.
    """
    for _, namespace, generation in _generations(url.removeprefix("dir:")):
        if number in (None, int(generation, 16)):
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                count = Deleted(*_count(namespace, generation))
                error = namespace.remove_tree(generation)
                if error is not None:
                    raise error
                yield count


def _generations(path: str | Path) -> Iterator[tuple[str, Folder, str]]:
    """Yield the fingerprint and the folder of each namespace, and the name of a generation's."""
    directory = Folder.at(path)
    for name in _hex_names(directory, FINGERPRINT_BYTES):
        with contextlib.suppress(NotADirectoryError):
            namespace = directory.below(name)
            for generation in _hex_names(namespace, NUMBER_BYTES):
                yield name, namespace, generation


def _hex_names(folder: Folder, nbytes: int) -> list[str]:
    return sorted(name for name in os.listdir(folder.fd) if is_hex(name, nbytes))


def _count(namespace: Folder, generation: str) -> tuple[int, int]:
    """Return the number of blocks in the folder of a generation, and the bytes of their files.

    Raises NotADirectoryError if it is something else. What a sweep removes meanwhile is left out.
    """
    blocks = nbytes = 0
    folder = namespace.below(generation)
    for hh in os.listdir(folder.fd):
        with contextlib.suppress(NotADirectoryError, FileNotFoundError):
            below = folder.below(hh)
            with os.scandir(below.fd) as entries:
                for entry in entries:
                    if entry.name.endswith(".kv") and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            nbytes += entry.stat(follow_symlinks=False).st_size
                            blocks += 1
    return blocks, nbytes
