"""The lines or the bytes of a trace file, decompressed in bounded memory.

Compression is recognised by the first bytes, not by the name, so that it works on standard input.
For an untrusted file this module holds at most one line of `MAX_LINE_BYTES` and the state of the
decompressor, at most 128 MiB. A small compressed file takes less: a line may have
`PACKED_LINE_BYTES`, and `MOST_RATIO` more per byte of the file that has been read, and zstandard's
window may not exceed by much what a file of this size unpacks to.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from kvoffload._extras import require
from kvoffload._printable import printable

from .errors import BadLineError, TraceError

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

# A prompt of a million tokens in 16-token blocks is 62,500 ids, below 1.4 MB with the longest of
# them; decoded, a line of the greatest length takes some 20 times its size.
MAX_LINE_BYTES = 16 * 2**20

PACKED_LINE_BYTES = 2**19
MOST_RATIO = 32  # of text and hashes by gzip and zstandard, 3 to 20 are usual
MIN_WINDOW, MAX_WINDOW = 23, 27  # log2 bytes: what all levels but `--ultra` use; zstandard's own

STDIN = "-"
_GZIP = b"\x1f\x8b"
_DEFLATE = _GZIP + b"\x08"  # the one method of compression that gzip has
_ZSTD = b"\x28\xb5\x2f\xfd"

# How a recording starts: an empty gzip member with a name, a zstandard frame that is skipped. A
# killed process may leave a recording whose last frame is cut off; the recording ends there. Any
# other compressed file that is cut off is damaged.
RECORDING = {
    ".gz": b"\x1f\x8b\x08\x08" + bytes(5) + b"\xffkvoffload recording\0\x03" + bytes(9),
    ".zst": b"\x50\x2a\x4d\x18\x13\0\0\0kvoffload recording",
}
# Formats that are not traces, by their first bytes: the name, and how to make a trace. The standard
# library reads bzip2 and xz, but the latter without a bound on memory.
_OTHERS = {
    b"BZh": ("bzip2", "bzip2 -dk unpacks it"),
    b"\xfd7zXZ\0": ("xz", "xz -dk unpacks it"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -dk unpacks it"),
    b"PK\x03\x04": ("a zip archive", "unzip unpacks it"),
    b"PAR1": ("Parquet", "it is read from a file only"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 converts it"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 converts it"),
}
_READ_BYTES = 2**17
STARTS = (_GZIP, _ZSTD, *RECORDING.values(), *_OTHERS)
"""The first bytes of files that are compressed, or in another form than text."""
START_BYTES = max(map(len, RECORDING.values()))
_MANY_BLANK_LINES = 16  # in a row, after which many are skipped at a time


def zstd_module() -> str:
    """Return the name of the module that handles zstandard on this Python."""
    return "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class Bytes:
    """The bytes of a file, ``-`` for standard input, decompressed.

    A context manager. The constructor opens the file, or raises TraceError.
    """

    _is_text = False

    def __init__(self, path: str) -> None:
        self.name = "<stdin>" if path == STDIN else path  # in messages
        self.count = 0  # of lines read: the number of the line read last
        self.is_recording = False  # the first bytes are those of a `TraceRecorder`
        self.is_packed = False
        self._file: _Resumed | None = None
        self._faults: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        with contextlib.ExitStack() as opened:
            try:
                self._stream: BinaryIO | None = self._open(path, opened)
            except TraceError:
                raise
            except (OSError, ValueError) as error:  # ValueError: a null character in the name
                rule = f"must be a readable file: {_why(error)}"
                raise TraceError(self.name, None, rule) from None
            self._closing = opened.pop_all()

    def _open(self, path: str, opened: contextlib.ExitStack) -> BinaryIO:
        # If it was closed at the start, a library may have taken its descriptor.
        if path == STDIN and sys.__stdin__ is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        file = opened.enter_context(io.FileIO(0 if path == STDIN else path, closefd=path != STDIN))
        start = _start(file)
        self._file = _Resumed(start, file)
        raw = opened.enter_context(io.BufferedReader(self._file, _READ_BYTES))
        self.is_recording = start.startswith(tuple(RECORDING.values()))
        # Binary data may start with the two bytes; text does not.
        if start.startswith(_GZIP if self._is_text else _DEFLATE):
            self.is_packed = True
            return cast("BinaryIO", opened.enter_context(gzip.GzipFile(fileobj=raw)))
        if start.startswith((_ZSTD, RECORDING[".zst"])):
            zstd = require(zstd_module(), "a zstandard trace")
            self._faults = (*self._faults, zstd.ZstdError)
            self.is_packed = True
            most = {zstd.DecompressionParameter.window_log_max: _window(file)}
            return cast("BinaryIO", opened.enter_context(zstd.ZstdFile(raw, options=most)))
        for other, (name, advice) in _OTHERS.items():
            if self._is_text and start.startswith(other):
                rule = f"must be text, plain or in gzip or zstandard, got {name}: {advice}"
                raise TraceError(self.name, None, rule)
        for suffix, form in ((".gz", "gzip"), (".zst", "zstandard")):
            if start and path.endswith(suffix):
                rule = f"must be {form} as its name says, got a file that starts with {start[:4]!r}"
                raise TraceError(self.name, None, rule)
        return cast("BinaryIO", raw)

    @property
    def bytes_read(self) -> int:
        """Bytes of the file itself, compressed or not, that have been read."""
        return 0 if self._file is None else self._file.bytes_read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream = None
        self._closing.close()

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes, fewer than asked for only at the end of the file.

        Raises
        ------
        TraceError
            If the file cannot be read, or the compressed data is cut off or damaged.
        """
        return self._from_stream("read", size)

    def _from_stream(self, method: str, size: int) -> bytes:
        """Return what a method of the stream returns, nothing at the end."""
        if self._stream is None:
            return b""
        try:
            found: bytes = getattr(self._stream, method)(size)
        except self._faults as error:
            found = self._end_by(error, None if method == "read" else self.count + 1)
        return found

    def _end_by(self, error: Exception, line: int | None) -> bytes:
        """End after a failed read: silently for a truncated recording, else with an error."""
        self._stream = None
        if self.is_recording and _is_cut_off(error):
            return b""
        rule = f"must be readable to its end: {_why(error)}"
        raise TraceError(self.name, line, rule) from None


class Lines(Bytes):
    """An iterator over the non-blank lines of a file, ``-`` for standard input, without line ends.

    A context manager. The constructor opens the file, or raises TraceError. After an overlong
    line is reported as BadLineError, iteration continues with the next line; after an error of the
    stream, a TraceError, it ends: the lines from there on are lost.
    """

    _is_text = True

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        super().__init__(path)
        self._max_line_bytes = max_line_bytes
        self._piece_bytes = self.most_bytes + 1
        self._is_within_line = False

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> bytes:
        blank_lines = 0
        while line := self.whole_line():
            line = line.strip()
            if line:
                return line
            blank_lines += 1
            if blank_lines >= _MANY_BLANK_LINES:
                self._pass_over_blank_lines()
        self._stream = None
        raise StopIteration

    def whole_line(self) -> bytes:
        """Return the next line as it is, blank or not, with its line end; empty at the end."""
        if self._is_within_line:
            self._pass_over()
        line = self._read()
        while line and not line.endswith(b"\n") and len(line) <= self.most_bytes:
            more = self._read(self.most_bytes + 1 - len(line))  # may be more than before reading
            if not more:
                break
            line += more
        if not line:
            return b""
        self.count += 1
        if not line.endswith(b"\n") and len(line) > self.most_bytes:
            self._is_within_line = True  # reported at once: the line may have no end
            rule = f"a line must be at most {self.most_bytes} bytes long"
            if self.most_bytes < self._max_line_bytes:
                rule += " this early in a compressed file (a file that is not may have longer ones)"
            raise BadLineError(f"{rule}, got a longer one")
        if self.count == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
        return line or b"\n"

    def ahead(self) -> bytes:
        """Return bytes that come next, without reading them; without a byte order mark."""
        return self._from_stream("peek", 1).removeprefix(b"\xef\xbb\xbf")

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest line that is accepted here."""
        if not self.is_packed:
            return self._max_line_bytes
        return min(self._max_line_bytes, PACKED_LINE_BYTES + MOST_RATIO * self.bytes_read)

    def _read(self, most: int | None = None) -> bytes:
        """Return the next piece of at most one line, empty at the end of the file."""
        return self._from_stream("readline", most or self._piece_bytes)

    def _pass_over(self) -> None:
        """Skip to the end of the line."""
        self._is_within_line = False
        while True:
            piece = self._read()
            if not piece or piece.endswith(b"\n"):
                return

    def _pass_over_blank_lines(self) -> None:
        """Skip all blank lines that are in the buffer at once."""
        ahead = self._from_stream("peek", 1)
        blank = len(ahead) - len(ahead.lstrip())
        end = ahead.rfind(b"\n", 0, blank) + 1
        if end and self._stream is not None:
            self._stream.read(end)
            self.count += ahead.count(b"\n", 0, end)


def is_read_again(path: str) -> bool:
    """Return whether a file can be read more than once, unlike a pipe or standard input."""
    return path != STDIN and os.path.isfile(path)  # noqa: PTH113 - no error is raised


def first_line(path: str, opened: Callable[[str], AbstractContextManager[Any]] = Lines) -> bytes:
    """Return the first line of a file that is not blank; nothing if it cannot be read again.

    `opened` opens it, as `Lines` or rows of another kind.
    """
    try:
        if not is_read_again(path):
            return b""
        with opened(path) as lines:
            found: bytes = next(lines, b"")
            return found
    except (OSError, ValueError):
        return b""  # the reader reports what is wrong with it


class _Resumed(io.RawIOBase):
    """A file whose start has been read already, read again from the start."""

    def __init__(self, start: bytes, file: io.FileIO) -> None:
        self._start = start
        self._file = file
        self.bytes_read = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Buffer, /) -> int | None:
        """Read into a buffer, at first a whole line; return how many bytes, 0 at the end."""
        if not self._start:
            size = self._file.readinto(buffer)
        else:
            view = memoryview(buffer)
            piece = size = min(len(view), len(self._start))
            view[:size], self._start = self._start[:size], self._start[size:]
            while piece and b"\n" not in bytes(view[size - piece : size]):
                piece = self._file.readinto(view[size:]) or 0
                size += piece
        self.bytes_read += size or 0
        return size


def _start(file: io.FileIO) -> bytes:
    """Read enough of a file to recognise its compression, however short the reads are."""
    start = b""
    while any(len(start) < len(known) and known.startswith(start) for known in STARTS):
        piece = file.read(START_BYTES - len(start))
        if not piece:
            break
        start += piece
    return start


def _window(file: io.FileIO) -> int:
    """Return log2 of the largest window with which a file is decompressed."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        return MAX_WINDOW
    unpacked = 2 * MOST_RATIO * status.st_size
    return min(MAX_WINDOW, max(MIN_WINDOW, unpacked.bit_length()))


def _is_cut_off(error: Exception) -> bool:
    """Return whether an error says that compressed data is truncated."""
    one_byte = isinstance(error, gzip.BadGzipFile) and "(b'\\x1f')" in str(error)
    return one_byte or isinstance(error, EOFError)


def _why(error: Exception) -> str:
    """Return the system's message for an error, without the file's name."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if _is_cut_off(error):
        return "the compressed data is cut off"
    return printable(str(error)) or type(error).__name__
