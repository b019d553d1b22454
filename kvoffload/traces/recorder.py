"""A manager that records the requests that it sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvoffload import BlockHash, OffloadingManager
from kvoffload.errors import describe, not_initialised
from kvoffload.managers.forwarding import ForwardingManager
from kvoffload.types import Spec_co

from .request_log import RequestLog

if TYPE_CHECKING:
    from typing_extensions import Self


class TraceRecorder(ForwardingManager[Spec_co]):
    """A manager that wraps another and records each `lookup` as a request of a trace.

    Every call is passed on to the wrapped manager unchanged, and its result or exception is passed
    back. One `lookup` is one request, and its hashes are the request's blocks. Their ids are salted
    with a secret of the recorder, which is never written: equal hashes have equal ids, and nothing
    else about a hash leaves the process. A recorded trace, which is in the Mooncake format, replays
    to the counters of the manager that it was recorded from, if that was driven request by request.

    A request's row has the hints that it began with: whether its session ends (`ends`) and when it
    asks again (`expect`, milliseconds), but not their source. Hints that are given only to
    `Request.finish` are not recorded, since the row may have been written by then.

    A thread of its own writes the trace (see `RequestLog` for what bounds it in memory and on
    disk). The manager's methods never raise an error of the file: recording stops, and one message
    is logged.

    Parameters
    ----------
    manager : OffloadingManager
        Any manager.
    path : str or os.PathLike
        The trace, ``.zst`` or ``.gz``; an existing file is kept as ``NAME-previous.…``.
    block_tokens : int, optional
        Tokens per block, 1 ... 2**31 - 1; by default the manager's `block_size`, or 1 if it has
        none. A request's length is recorded as that of its blocks.
    max_bytes : int
        Most bytes on disk, the previous file included, >= 65,536.

    Attributes
    ----------
    manager : OffloadingManager
        The manager.
    log : RequestLog
        The log that writes the trace: whether it is `recording`, how many requests it dropped.

    Raises
    ------
    TypeError, ValueError, OSError, MissingExtraError
        From the constructor only, as from that of `RequestLog`.

    Notes
    -----
    Thread-safety: that of the manager. Other attributes are those of the manager.

    Complexity: `lookup` adds O(n), some nanoseconds per block; the other methods add nothing.

    Examples
    --------
    >>> import tempfile
    >>> from kvoffload import CPUOffloadingManager
    >>> from kvoffload.traces import Trace, TraceRecorder
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = folder.name + "/trace.jsonl.gz"
    >>> with TraceRecorder(CPUOffloadingManager(16, 100), path) as manager:
    ...     manager.lookup([b"block 0", b"block 1"])
    0
    >>> [request.input_length for request in Trace(path)]
    [32]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        manager: OffloadingManager[Spec_co],
        path: str | os.PathLike[str],
        *,
        block_tokens: int | None = None,
        max_bytes: int = 2**30,
    ) -> None:
        if not isinstance(manager, OffloadingManager):
            raise TypeError(f"manager must be an OffloadingManager, got {describe(manager)}")
        if block_tokens is None:
            block_tokens = getattr(manager, "block_size", 1)
        self.manager = manager
        self.log = RequestLog(path, block_tokens=block_tokens, max_bytes=max_bytes)
        self._lookup = _recorded(manager.lookup, self.log)
        self.log.finish_with(self._lookup)
        # found before the methods of the class, without an indirection
        vars(self).update({name: getattr(manager, name) for name in _PASSED_ON})
        vars(self)["lookup"] = self._lookup

    def lookup(self, hashes: Iterable[bytes]) -> int:
        """Count the leading blocks that are ready, and record the request."""
        return self._lookup(hashes)

    def _lookup_told(self, hashes: list[BlockHash], *told: Any) -> int:
        found = super()._lookup_told(hashes, *told)
        self.log.add(hashes, hints=told[0])
        return found

    def close(self) -> None:
        """Write the queued requests and stop recording; the manager goes on. Repeatable.

        A recorder that is garbage collected does the same by itself: its thread ends at its next
        poll of the queue, usually within a tenth of a second.
        """
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "manager":  # not yet set
            raise not_initialised("recorder")
        return getattr(self.manager, name)

    def __reduce__(self) -> str:
        raise TypeError("a TraceRecorder cannot be copied or pickled: it holds an open file")

    def __bool__(self) -> bool:
        return bool(self.manager)  # `__len__` below must not decide it

    def __len__(self) -> int:
        return len(self.manager)  # type: ignore[arg-type]

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.manager  # type: ignore[operator]


_PASSED_ON = (
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store",
    "complete_store",
    "take_events",
)


def _recorded(
    lookup: Callable[[Iterable[bytes]], int], log: RequestLog
) -> Callable[[Iterable[bytes]], int]:
    """Return a lookup that records its hashes.

    A closure, because finding an attribute of an object with `__getattr__` takes longer than the
    rest of the work for a request.
    """

    def recorded(hashes: Iterable[bytes]) -> int:
        if not log.recording:
            return lookup(hashes)
        if type(hashes) is list:
            found = lookup(hashes)
            log.add(hashes)
            return found
        if isinstance(hashes, bytes | bytearray | memoryview | str):
            return lookup(hashes)  # a hash instead of a batch: the manager raises
        try:
            iterator = iter(hashes)
        except TypeError:
            return lookup(hashes)  # the manager raises
        batch = list(iterator)
        # the manager checks each hash of an iterable that is neither a list nor a tuple
        found = lookup(batch if isinstance(hashes, list | tuple) else iter(batch))
        log.add(batch)
        return found

    return recorded
