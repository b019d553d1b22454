"""A log of requests on disk: salted, compressed, bounded, written by a thread of its own.

The thread that sees a request only puts 8 bytes per hash on a queue. The log's thread empties the
queue ten times per second, turns it into lines with salted ids, and writes these in compressed
frames, each complete in itself: once per second, and as soon as no request has come for 0.3
seconds. In the file of a killed process every frame but the last is complete; the reader allows for
that in files with a recording's first bytes.

A new file is begun when the file has half of the bytes that the log may take, and the previous one
is kept.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gzip
import logging
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload import IMPLEMENTATION, Hints
from kvoffload._checks import check_int
from kvoffload._extras import require
from kvoffload._printable import printable

from .lines import RECORDING, START_BYTES, zstd_module
from .outputs import own_descriptor

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._request_lines_py import ID_BYTES, LINE_BYTES, packed, request_lines
else:
    from ._request_lines_c import ID_BYTES, LINE_BYTES, packed, request_lines

MIN_BYTES, MAX_BYTES = 2**16, 2**63 - 1
POLL_SECONDS = 0.1
FLUSH_SECONDS = 1.0  # longest that a request waits for others of its frame
IDLE_SECONDS = 0.3  # longest wait while none comes: an idle server that is killed loses none
WAITING_BLOCKS = 2**19  # of requests not yet taken; 4 MiB, and a line that the reader accepts
REQUEST_BLOCKS = 16  # cost of a request beside its blocks, in blocks
HURRY_BLOCKS = 2**16  # the number of waiting ones that wakes the thread early
BATCH_BYTES = 2**15  # of text made at a time: some 0.02 ms during which no other thread runs
FRAME_BYTES = 2**22  # of text
WORD_BYTES = 8  # of a packed hash
MAX_BLOCK_TOKENS = 2**31 - 1
MAX_EXPECT_MS = 2**53  # the most that the reader accepts

_logger = logging.getLogger(__name__)


class RequestLog:
    """A writer of requests to a file in the Mooncake format, with salted ids.

    Nothing is raised once the log is open. If the file cannot be written, recording stops and one
    message is logged; if requests come faster than they can be written, those that exceed the queue
    are dropped and counted.

    `add` may be called from any thread. In a process forked from this one the log does not record.
    Messages are logged by the log's own thread.

    Parameters
    ----------
    path : str or os.PathLike
        The file, ``.zst`` or ``.gz``. An existing file is kept as `previous_path`. A link stays,
        and its target is written; a device is written to directly.
    block_tokens : int
        Tokens per block, 1 ... 2**31 - 1; a request's length is recorded as that of its blocks,
        plus the `more_tokens` of `add`.
    max_bytes : int
        Most bytes on disk, both files together, >= 65,536. An existing larger file is counted
        only from when it is replaced.

    Raises
    ------
    TypeError, ValueError
        If the name has another ending, or leads to a pipe or a socket, whose reader the recording
        would wait for; or if a number has the wrong type or is out of bounds.
    OSError
        If the file cannot be created.
    MissingExtraError
        For ``.zst`` without the ``cli`` extra, before Python 3.14.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, block_tokens: int = 1, max_bytes: int = 2**30
    ) -> None:
        self.path = Path(path)
        self._compress = _compressor(self.path)
        self._block_tokens = check_int("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
        self._max_file_bytes = check_int("max_bytes", max_bytes, MIN_BYTES, MAX_BYTES) // 2
        self._target = _target(self.path)
        stem, *suffixes = self._target.name.split(".")
        self.previous_path = self._target.with_name(".".join([f"{stem}-previous", *suffixes]))
        self.recording = True  # requests are accepted
        self.dropped_requests = 0  # too many were waiting, or one was too long
        self._frame_bytes = min(FRAME_BYTES, self._max_file_bytes)
        self._salt = secrets.randbits(64), secrets.randbits(64)
        self._start = time.monotonic_ns()
        self._queue: collections.deque[bytes] = collections.deque()
        self._added = 0  # put on the queue: blocks, and REQUEST_BLOCKS per request
        self._taken = 0  # taken from it, likewise
        self._text: list[bytes] = []  # lines not yet written
        self._text_bytes = 0
        self._text_requests = 0
        self._text_since = 0.0  # when the first of these lines came; the next, the last
        self._text_until = 0.0
        self._file_bytes = 0
        self._file = self._open()
        self._closing = False
        self._stopped = False
        self._messages: list[str] = []  # not yet logged by the thread
        self._call = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-recorder", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left
            os.close(self._file)
            raise
        atexit.register(self.close)
        _logs.add(self)

    def add(self, hashes: list[Any], more_tokens: int = 0, hints: Hints | None = None) -> None:
        """Add a request, given as the list of its block hashes. Complexity: O(n).

        `more_tokens` is 1 if its length is that of the blocks plus a token, else 0. From `hints`
        the row has `expect`, whole milliseconds from 1 to 2**53, and `ends`; never the source.
        """
        if not self.recording:
            return
        try:
            said = 0
            size = len(hashes) + REQUEST_BLOCKS
            if hints is not None and (said := _said(hints)):
                size += 1
            waiting = self._added - self._taken + size
            if waiting > WAITING_BLOCKS:
                self._drop(1, "requests come faster than they can be recorded")
                return
            self._queue.append(packed(hashes, more_tokens, said))
            self._added += size
            if waiting > HURRY_BLOCKS and not self._call.is_set():
                self._call.set()
        except Exception as error:  # noqa: BLE001 (nothing may reach the engine)
            self._stop(error)

    def close(self) -> None:
        """Write the queued requests, close the file and stop recording. Repeatable.

        If a `logging` handler calls it on the log's own thread, it does not wait for the end.
        """
        self.finish()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # not in a forked child, where the event may stay locked forever
            self._call.set()
            self._thread.join()
        atexit.unregister(self.close)

    def finish(self) -> None:
        """Close without waiting: the thread writes the queued requests and ends soon."""
        self.recording = False
        self._closing = True

    def finish_with(self, owner: object) -> None:
        """Finish when an object is garbage collected, so that thread and file do not outlive it."""
        # safe in the middle of any code, since it only sets two attributes
        weakref.finalize(owner, self.finish).atexit = False

    def _run(self) -> None:
        try:
            while not self._closing:
                self._call.wait(POLL_SECONDS)
                self._call.clear()
                self._log_messages()
                self._take()
                now = time.monotonic()
                waited, idle = now - self._text_since, now - self._text_until
                if waited >= FLUSH_SECONDS or idle >= IDLE_SECONDS:
                    self._write()
            self._take()
            self._write()
        except Exception as error:  # noqa: BLE001 (nothing may reach the engine)
            self._queue.clear()
            self._stop(error)
        try:
            os.close(self._file)
        except OSError as error:
            self._stop(error)
        atexit.unregister(self.close)
        self._log_messages()

    def _take(self) -> None:
        """Turn the queued requests into lines."""
        most = min(BATCH_BYTES, self._frame_bytes)
        while self._queue:
            requests = [self._queue.popleft()]
            size = _most_bytes(requests[0])
            while self._queue and size + _most_bytes(self._queue[0]) <= most:
                requests.append(self._queue.popleft())
                size += _most_bytes(requests[-1])
            text = request_lines(requests, *self._salt, self._start, self._block_tokens)
            self._add_text(text, len(requests))
            words = sum(map(len, requests)) // WORD_BYTES
            self._taken += words + len(requests) * (REQUEST_BLOCKS - 1)  # one is the time
        self._taken = self._added  # additions from several threads at once may have been lost

    def _add_text(self, text: bytes, requests: int) -> None:
        """Add lines to the next frame; write the frame before if they would not fit."""
        if self._text_bytes + len(text) > self._frame_bytes:
            self._write()
        self._text_until = time.monotonic()
        if not self._text:
            self._text_since = self._text_until
        self._text.append(text)
        self._text_bytes += len(text)
        self._text_requests += requests

    def _write(self) -> None:
        """Write the lines as one frame."""
        if not self._text:
            return
        frame = self._compress(b"".join(self._text))
        if not self._file_bytes:
            frame = RECORDING[self.path.suffix] + frame
        requests = self._text_requests
        self._text.clear()
        self._text_bytes = self._text_requests = 0
        if len(frame) + START_BYTES > self._max_file_bytes:
            self._drop(requests, f"a request is too long for files of {self._max_file_bytes} bytes")
            return
        if self._file_bytes + len(frame) > self._max_file_bytes:
            full = self._file
            self._file = self._open()
            os.close(full)
            frame = RECORDING[self.path.suffix] + frame
        try:
            rest = memoryview(frame)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # part of a frame cannot be read
                os.ftruncate(self._file, self._file_bytes)
            raise
        self._file_bytes += len(frame)

    def _open(self) -> int:
        """Keep an existing file as the previous one and return a new one of the same mode."""
        mode = None
        if self._target.is_file() and self._target.stat().st_size:
            mode = stat.S_IMODE(self._target.stat().st_mode)
            self._target.replace(self.previous_path)
        self._file_bytes = 0
        file = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(file, mode)
        return file

    def _drop(self, requests: int, reason: str) -> None:
        if not self.dropped_requests:
            self._messages.append(f"{reason}; some are left out")
        self.dropped_requests += requests

    def _stop(self, error: Exception) -> None:
        if not self._stopped:
            self._messages.append(f"recording stopped: {error}")
        self._stopped = True
        self.finish()

    def _log_messages(self) -> None:
        """Log the pending messages, and ignore errors of handlers."""
        while self._messages:
            with contextlib.suppress(Exception):
                _logger.warning("%s: %s", printable(str(self.path)), self._messages.pop(0))


def _target(path: Path) -> Path:
    """Return the regular file or the device that a path leads to."""
    target = Path(os.path.realpath(path))
    if own_descriptor(os.fspath(path)) is not None:
        raise ValueError(f"path must be a file or a device, got a stream: {os.fspath(path)!r}")
    try:
        mode = target.stat().st_mode
    except OSError:  # not there yet, or opening it reports what is wrong
        return target
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket"
        raise ValueError(f"path must be a file or a device, got {kind}: {os.fspath(path)!r}")
    return target


def _said(hints: Hints) -> int:
    """Return hints as `packed` takes them; 0 if they are empty."""
    if hints.expect_s is None:
        return int(hints.ends)
    expect_ms = round(min(1000 * hints.expect_s, MAX_EXPECT_MS)) or 1
    return 2 * expect_ms + hints.ends


def _most_bytes(request: bytes) -> int:
    """Return the greatest length of the line of a packed request."""
    return LINE_BYTES + len(request) // WORD_BYTES * ID_BYTES


def _compressor(path: Path) -> Callable[[bytes], bytes]:
    """Return the function that compresses bytes to a complete frame, by the file's name."""
    if path.suffix == ".zst":
        compress: Callable[[bytes, int], bytes] = require(zstd_module(), "a .zst trace").compress
        return lambda data: compress(data, 1)
    if path.suffix == ".gz":
        return lambda data: gzip.compress(data, 1, mtime=0)
    raise ValueError(f"path must end in .zst or .gz, got {path.name!r}")


# A forked child has no thread to write, and must not write to its parent's file.
_logs: weakref.WeakSet[RequestLog] = weakref.WeakSet()


def _forget_logs() -> None:
    for log in _logs:
        log.recording = False
        atexit.unregister(log.close)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_logs)
