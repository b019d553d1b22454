"""A log of requests on disk: salted, compressed, bounded, written by a thread of its own.

The thread that sees a request only puts 8 bytes a hash on a queue. The log's thread takes them from
there ten times a second, turns them into salted ids and ids into lines, and writes these in
compressed frames, each complete in itself, at least once a second: of what a killed process leaves,
every frame but the last is complete, and the reader knows by the first bytes that it may be so.
The file is exchanged for a new one when it has half of the bytes that the log may take, and the one
before it is kept.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gzip
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvoffload import IMPLEMENTATION

from ._extras import require
from .lines import RECORDING, zstd_module

if IMPLEMENTATION == "compiled":
    from ._salted_ids_c import TEXT_BYTES, fingerprints, salted_texts
else:
    from ._salted_ids_py import TEXT_BYTES, fingerprints, salted_texts

MIN_BYTES = 2**16
POLL_SECONDS = 0.1
FLUSH_SECONDS = 1.0
WAITING_BLOCKS = 2**19  # of requests not yet written; 4 MiB, and a line that the reader accepts
HURRY_BLOCKS = 2**16  # the thread is called earlier when so many wait
BATCH_BLOCKS = 2**11  # turned into text at a time; some 0.1 ms during which no other thread runs
FRAME_BYTES = 2**22  # of text
WORD_BYTES = 8  # of a fingerprint

_LINE = b'{"timestamp":%d,"input_length":%d,"output_length":0,"hash_ids":[%b]}\n'

_START_BYTES = max(map(len, RECORDING.values()))

_logger = logging.getLogger(__name__)


class RequestLog:
    """Write requests to a file in the Mooncake form, with salted ids.

    Nothing is raised once the log is open. Where it cannot be written it stops, and says so once
    through `logging`; where requests come faster than they can be written, those that do not find
    room are dropped and counted.

    Parameters
    ----------
    path : str or os.PathLike
        The file, ``.zst`` or ``.gz``. A file that is there is kept as `previous_path`.
    block_tokens : int
        Tokens a block; a request's length is recorded as that of its blocks.
    max_bytes : int
        Most bytes on disk, both files together, >= 65,536.

    Attributes
    ----------
    recording : bool
        Whether requests are taken.
    dropped_requests : int
        Requests that were not taken because too many were waiting or one was too long.
    previous_path : pathlib.Path
        The file before the present one.

    Raises
    ------
    ValueError
        If the name has another ending, or a number is below its bound.
    OSError
        If the file cannot be created.
    MissingExtraError
        For ``.zst`` without the ``cli`` extra, before Python 3.14.

    Notes
    -----
    `add` may be called from any thread. In a process forked from this one the log does not record.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, block_tokens: int = 1, max_bytes: int = 2**30
    ) -> None:
        self.path = Path(path)
        self._compress = _compressor(self.path)
        for argument, value, least in (
            ("block_tokens", block_tokens, 1),
            ("max_bytes", max_bytes, MIN_BYTES),
        ):
            if value < least:
                raise ValueError(f"{argument} must be >= {least}, got {value}")
        stem, *suffixes = self.path.name.split(".")
        self.previous_path = self.path.with_name(".".join([f"{stem}-previous", *suffixes]))
        self.recording = True
        self.dropped_requests = 0
        self._block_tokens = block_tokens
        self._max_file_bytes = max_bytes // 2
        self._frame_bytes = min(FRAME_BYTES, self._max_file_bytes)
        self._salt = secrets.randbits(64), secrets.randbits(64)
        self._start = time.monotonic_ns()
        self._queue: collections.deque[tuple[int, bytes]] = collections.deque()
        self._added = 0  # blocks put on the queue
        self._taken = 0  # blocks taken from it
        self._text: list[bytes] = []  # lines not yet written
        self._text_bytes = 0
        self._text_since = 0.0
        self._file_bytes = 0
        self._file = self._open()
        self._closing = False
        self._call = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffload-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _logs.add(self)

    def add(self, hashes: list[Any]) -> None:
        """Take a request, given as the list of its block hashes. Complexity: O(n)."""
        if not self.recording:
            return
        waiting = self._added - self._taken + len(hashes)
        if waiting > WAITING_BLOCKS:
            self._drop(1)
            return
        self._added += len(hashes)
        self._queue.append((time.monotonic_ns(), fingerprints(hashes)))
        if waiting > HURRY_BLOCKS and not self._call.is_set():
            self._call.set()

    def close(self) -> None:
        """Write what is waiting, close the file and record no more. A second call does nothing."""
        self.recording = False
        self._closing = True
        self._call.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._call.wait(POLL_SECONDS)
                self._call.clear()
                self._take()
                if self._text and time.monotonic() - self._text_since >= FLUSH_SECONDS:
                    self._write()
            self._take()
            self._write()
        except Exception as error:  # noqa: BLE001 (nothing may reach the engine)
            self._stop(error)
        finally:
            os.close(self._file)

    def _take(self) -> None:
        """Turn the requests that wait into lines."""
        while self._queue:
            requests = []
            waiting = 0
            while self._queue and waiting < BATCH_BLOCKS * WORD_BYTES:
                requests.append(self._queue.popleft())
                waiting += len(requests[-1][1])
            self._add_lines(requests)
            self._taken += waiting // WORD_BYTES
        self._taken = self._added  # additions from several threads at once may have been lost

    def _add_lines(self, requests: list[tuple[int, bytes]]) -> None:
        words = b"".join([words for _, words in requests])
        ids = b"".join(
            salted_texts(words[start : start + BATCH_BLOCKS * WORD_BYTES], *self._salt)
            for start in range(0, len(words), BATCH_BLOCKS * WORD_BYTES)
        )
        first = 0
        for moment, words in requests:
            blocks = len(words) // WORD_BYTES
            last = first + blocks * TEXT_BYTES
            self._add_line(
                _LINE
                % (
                    (moment - self._start) // 1_000_000,
                    blocks * self._block_tokens,
                    ids[first : last - bool(blocks)],  # without the last comma
                )
            )
            first = last

    def _add_line(self, line: bytes) -> None:
        """Put a line into the next frame, after a frame of those before it if it would be full."""
        if self._text_bytes + len(line) > self._frame_bytes:
            self._write()
        if not self._text:
            self._text_since = time.monotonic()
        self._text.append(line)
        self._text_bytes += len(line)

    def _write(self) -> None:
        """Write the lines as one frame."""
        if not self._text:
            return
        frame = self._compress(b"".join(self._text))
        if not self._file_bytes:
            frame = RECORDING[self.path.suffix] + frame
        requests = len(self._text)
        self._text.clear()
        self._text_bytes = 0
        if len(frame) + _START_BYTES > self._max_file_bytes:
            self._drop(requests)
            return
        if self._file_bytes + len(frame) > self._max_file_bytes:
            os.close(self._file)
            self._file = self._open()
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
        """Keep the file that is there as the previous one and return a new one."""
        if self.path.is_file() and self.path.stat().st_size:
            self.path.replace(self.previous_path)
        self._file_bytes = 0
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def _drop(self, requests: int) -> None:
        if not self.dropped_requests:
            _logger.warning("%s: requests come faster than they can be recorded", self.path)
        self.dropped_requests += requests

    def _stop(self, error: Exception) -> None:
        self.recording = False
        self._queue.clear()
        self._text.clear()
        _logger.warning("%s: recording stopped: %s", self.path, error)


def _compressor(path: Path) -> Callable[[bytes], bytes]:
    """Return what makes a complete frame of bytes, by the file's name."""
    if path.suffix == ".zst":
        compress: Callable[[bytes, int], bytes] = require(zstd_module(), "a .zst trace").compress
        return lambda data: compress(data, 1)
    if path.suffix == ".gz":
        return lambda data: gzip.compress(data, 1, mtime=0)
    raise ValueError(f"path must end in .zst or .gz, got {path.name!r}")


# A child has no thread that would write, and must not write into its parent's file.
_logs: weakref.WeakSet[RequestLog] = weakref.WeakSet()


def _forget_logs() -> None:
    for log in _logs:
        log.recording = False
        atexit.unregister(log.close)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_logs)
