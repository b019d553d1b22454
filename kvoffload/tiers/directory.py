"""A directory that many processes and machines share: NFS, Lustre, a volume for many engines.

Below the directory lies a folder for each namespace, named by its fingerprint:

=========================== ====================================================================
``namespace.json``          what the bytes mean
``epoch``                   16 hex digits: the present epoch
``epoch.lock``              locked by who gives the directory a higher one
``*.not-an-epoch``          what a stranger had put in its place, and is no file
``<epoch>/<hh>/<key>.kv``   a block, and a page of 4096 bytes that begins with its seal; ``hh`` are
                            two hex digits of a sum of the key, the name is the stored key in hex
``<epoch>/<hh>/*.tmp``      a block that is being written
``sweep.lock``              locked by who sweeps; its time of change is that of the last sweep
=========================== ====================================================================

Structure
    A block is written to a file that nobody else has (``O_EXCL``) and then linked to its name,
    which is there or not, whole. Where there are no links it is renamed. A thread of the tier
    sweeps from time to time: it removes the oldest blocks until the others fit, what was forgotten,
    and what writers that died left behind. A lock lets one process at a time sweep.
Invariants
    A name appears with all its bytes written. Nothing is synced: what a server that lost power
    leaves does not match its seal unless it is right. What strangers put there - links, pipes,
    files of any size - is opened without waiting, and read no further than a block is long.
Cost
    A put is a look whether the block is there, and five calls of the file system where it is not; a
    get is an open, a look at the size, a read and a close. A sweep looks at every file, and holds 8
    bytes of memory per block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from kvoffload._checks import check_int
from kvoffload.errors import describe

from ._io_py import NO_SPACE, Block, transfer
from .base import Status
from .epoch import EPOCH_CHARACTERS, epoch_text, parse_epoch
from .namespace import Namespace
from .pool import Pool
from .pooled import MAX_QUEUED_BYTES
from .region import Region
from .remote import RemoteTier
from .remote_pool import RemoteStore
from .seal import SEAL_BYTES, xxh3_64
from .staging import STAGING_BYTES
from .sweeper import Sweeper

__all__ = ["DirectoryTier"]

PAGE_BYTES = 4096
RENEW_S = 3600.0
"""A block that is used has its time of change renewed at most so often."""
SWEEP_S = 60.0
LOCK_S = 0.005
"""Seconds between two tries to get a lock."""
STOP_S = 0.2
"""Seconds that closing waits for a sweep to stop."""
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
_NO_FILE = frozenset({errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EAGAIN})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP})
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DirectoryStore(RemoteStore):
    """Blocks in files below a directory.

    Parameters
    ----------
    name : str
        The tier's label, for logs.
    namespace : Namespace
        What the bytes mean.
    path : Path
        The directory.
    """

    blocks_per_call = 1
    keys_per_query = 64

    def __init__(self, name: str, namespace: Namespace, path: Path) -> None:
        super().__init__(name, namespace)
        self.folder = path / self.fingerprint.hex()
        self.on_written: Callable[[], None] = lambda: None

    def _path(self, key: bytes, epoch: int) -> str:
        return f"{self.folder}/{epoch:016x}/{xxh3_64(key) & 0xFF:02x}/{key.hex()}.kv"

    # -- epochs ------------------------------------------------------------------------------

    def read_epoch(self) -> int | None:
        """Return the epoch that the directory has; None where it has none, or nonsense."""
        return parse_epoch(_read_small(self.folder / "epoch", EPOCH_CHARACTERS))

    def _ask_epoch(self) -> int | None:
        found = self.read_epoch()
        json = _read_small(self.folder / "namespace.json", self._json_bytes)
        if not self._compare(json):
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            self._write_small("namespace.json", self.namespace.json.encode("ascii"))
        return found

    def _raise_epoch(self, epoch: int) -> int:
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        with self._locked("epoch.lock"):
            found = self.read_epoch()
            if found is not None and found >= epoch:
                return found
            self._write_small("epoch", epoch_text(epoch))
        found = self.read_epoch()
        if found is None:
            raise OSError(errno.EIO, "the epoch cannot be read back")
        return found

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a file, which no process that has ended holds.

        Raises
        ------
        TimeoutError
            If another process keeps it until the deadline, as one that was stopped does.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.folder / name, flags, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.is_overdue():
                        raise TimeoutError from None
                    time.sleep(LOCK_S)
                except OSError as error:  # a file system without locks: the last writer wins
                    if error.errno not in _NO_LOCKS:
                        raise
                    break
            yield
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child has the descriptor, too
        finally:
            os.close(fd)

    def _write_small(self, name: str, data: bytes) -> None:
        """Write a file whole and durably, in place of whatever has its name."""
        path = self.folder / name
        temporary = self.folder / f"{name}.{_random()}.tmp"
        fd = os.open(temporary, _NEW_FLAGS, 0o600)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            temporary.replace(path)
        except (IsADirectoryError, FileExistsError):
            path.rename(self.folder / f"{name}.{_random()}.not-an-epoch")
            temporary.replace(path)
        folder = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    # -- blocks ------------------------------------------------------------------------------

    def _find(self, run: Sequence[Block], epoch: int) -> None:
        for block in run:
            try:
                os.stat(self._path(block.key, epoch), follow_symlinks=False)
                block.status = Status.OK
            except OSError as error:
                block.status = _status(error)

    def _fetch(self, run: Sequence[Block], epoch: int) -> None:
        for block in run:
            try:
                self._fetch_one(block, epoch)
            except OSError as error:
                block.status = _status(error)

    def _fetch_one(self, block: Block, epoch: int) -> None:
        try:
            fd = os.open(self._path(block.key, epoch), _READ_FLAGS)
        except OSError as error:
            block.status = Status.CORRUPT if error.errno == errno.ELOOP else _status(error)
            return
        try:
            found = os.fstat(fd)
            view = block.views[0]
            if (
                not stat.S_ISREG(found.st_mode)
                or found.st_size != self.content_bytes + PAGE_BYTES
                or transfer(os.preadv, fd, [view], 0) < self.block_bytes
            ):
                block.status = Status.CORRUPT
                return
            self._check(block, view, epoch)
            if block.status == Status.OK and time.time() - found.st_mtime > RENEW_S:
                with contextlib.suppress(OSError):  # a file of another user
                    os.utime(fd)
        finally:
            os.close(fd)

    def _store(self, run: Sequence[Block], epoch: int) -> None:
        for block in run:
            try:
                self._store_one(block, self._path(block.key, epoch))
                block.status = Status.OK
            except OSError as error:
                if error.errno in _GONE:  # a folder that a sweep removed meanwhile
                    block.status = Status.FAILED
                    continue
                block.status = _status(error)

    def _store_one(self, block: Block, path: str) -> None:
        try:
            os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            return
        temporary = f"{path[:-3]}.{_random()}.tmp"
        try:
            fd = os.open(temporary, _NEW_FLAGS, 0o600)
        except FileNotFoundError:
            folder = Path(path).parent
            folder.parent.mkdir(0o700, exist_ok=True)
            folder.mkdir(0o700, exist_ok=True)
            fd = os.open(temporary, _NEW_FLAGS, 0o600)
        try:
            try:
                views = [block.views[0], memoryview(bytes(PAGE_BYTES - SEAL_BYTES))]
                if transfer(os.pwritev, fd, views, 0) < self.content_bytes + PAGE_BYTES:
                    raise OSError(errno.EIO, "the file system wrote nothing")
            finally:
                os.close(fd)  # NFS says here what went wrong
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        with contextlib.suppress(FileExistsError):  # another writer's, of the same bytes
            _link(temporary, path)
        self.on_written()

    def _drop(self, keys: Sequence[bytes], epoch: int) -> None:
        for key in keys:
            path = self._path(key, epoch)
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def _touch(self, keys: Sequence[bytes], epoch: int) -> None:
        for key in keys:
            path = self._path(key, epoch)
            with contextlib.suppress(OSError):
                found = os.stat(path, follow_symlinks=False)
                if time.time() - found.st_mtime > RENEW_S:
                    os.utime(path, follow_symlinks=False)

    def _status_of(self, error: Exception) -> Status:
        return _status(error) if isinstance(error, OSError) else Status.FAILED


class DirectoryTier(RemoteTier):
    """A tier in a directory that several processes share, on one machine or on many.

    Parameters
    ----------
    path : str or Path
        The directory; made when it is first needed.
    capacity_bytes : int
        Bytes of blocks of this namespace that are kept at most, whoever wrote them, when a sweep
        has ended; each takes a page of 4096 bytes more. All tiers of a namespace should be given
        the same.
    threads : int
        Number of threads that read and write, >= 1.
    namespace : Namespace
        What the bytes mean; its ``block_bytes`` is the size of a block.
    sweep_s : float
        Seconds between two sweeps. A tier that has written a sixteenth of the capacity since it
        last looked sweeps earlier.
    staging_bytes, ack, name, enable_events, max_queued_bytes
        As of `FileTier`; this tier is always staged.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    The oldest time of change leaves first; a hit renews it once an hour at most. Events of blocks
    that left come from the tier whose sweep removed them. `forget` holds for all tiers of the
    namespace, for those of other processes within a second.
    """

    touch_s = RENEW_S

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        threads: int = 8,
        *,
        namespace: Namespace,
        sweep_s: float = SWEEP_S,
        staging_bytes: int = STAGING_BYTES,
        ack: str = "copied",
        name: str = "directory",
        enable_events: bool = False,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        if not isinstance(path, str | Path) or not str(path):  # type: ignore[redundant-expr]
            raise TypeError(f"path must be the path of a directory, got {describe(path)}")
        if not isinstance(sweep_s, int | float) or not sweep_s > 0:  # type: ignore[redundant-expr]
            raise ValueError(f"sweep_s must be a number > 0, got {describe(sweep_s)}")
        self._path = Path(path)
        self._sweep_s = float(sweep_s)
        super().__init__(
            namespace,
            check_int("capacity_bytes", capacity_bytes, getattr(namespace, "block_bytes", 1)),
            threads=threads,
            staging_bytes=staging_bytes,
            ack=ack,
            name=name,
            enable_events=enable_events,
            max_queued_bytes=max_queued_bytes,
        )
        max_blocks = check_int("capacity_bytes", capacity_bytes) // namespace.block_bytes
        self._sweeper = Sweeper(
            self.folder, self._files.read_epoch, max_blocks, self._sweep_s, self._store.say
        )
        self._files.on_written = self._sweeper.count_written
        self._open()

    def _make_store(self) -> DirectoryStore:
        return DirectoryStore(self.name, self.namespace, self._path)

    @property
    def _files(self) -> DirectoryStore:
        return cast("DirectoryStore", self._store)

    @property
    def place(self) -> str:
        """The directory."""
        return str(self._path)

    @property
    def folder(self) -> Path:
        """Folder of the namespace."""
        return self._files.folder

    def _make_pool(self, region: Region) -> Pool:
        self._sweeper.start()
        return super()._make_pool(region)

    def sweep(self) -> int | None:
        """Sweep now, in the caller's thread; the tier does so by itself from time to time.

        Returns
        -------
        int or None
            Blocks that were removed; None where another process sweeps, or nothing was stored yet.

        Raises
        ------
        OSError
            If the directory cannot be read.
        RuntimeError
            If the tier is closed.
        """
        self._refuse_closed()
        return self._sweeper.sweep()

    def _collect(self, pool: Pool) -> None:
        super()._collect(pool)
        swept = self._sweeper.take_swept()
        if swept:
            self._verdicts.absent(swept)
            self._emit(swept, removed=True, reason="evicted")

    def _before_close(self) -> None:
        super()._before_close()
        self._sweeper.stop(STOP_S)


def _read_small(path: Path, most: int) -> bytes | None:
    """Return a small file's bytes; None where there is none, or a longer one, or no file."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno in _NO_FILE:
            return None
        raise
    try:
        found = b""
        while len(found) <= most:
            piece = os.read(fd, most + 1 - len(found))
            if not piece:
                return found
            found += piece
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    finally:
        os.close(fd)
    return None


def _random() -> str:
    """Return a part of a name that nobody else has."""
    return secrets.token_hex(8)


def _link(temporary: str, path: str) -> None:
    """Give a file that is whole its name, and take the other away.

    Raises
    ------
    FileExistsError
        If the name is taken.
    OSError
        If it cannot be done.
    """
    try:
        try:
            os.link(temporary, path, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINKS:
                os.rename(temporary, path)  # of equal bytes the last writer's stay
                return
            # The answer of a server may have been lost, and the link be there.
            if isinstance(error, FileExistsError) or os.stat(temporary).st_nlink != 2:
                raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _status(error: OSError) -> Status:
    if error.errno in _GONE:
        return Status.MISS
    return Status.FULL if error.errno in NO_SPACE else Status.FAILED
