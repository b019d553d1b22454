"""The standard streams of the process, made safe for the command.

They may be closed, full, or pipes whose reader is gone; buffered or not.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from kvoffload._output_file import OutputFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

STDOUT = "<stdout>"
"""Name of standard output in messages."""


class _StandardError(OutputFile):
    """Standard error; output that cannot be written is dropped."""

    def write(self, data: Buffer, /) -> int:
        """Write as much as possible; on an error, drop all of it."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Make errors of standard output name it, and ignore those of standard error.

    The descriptor of a closed stream is given to an unusable file: otherwise the next file opened
    would get it and be taken for the stream. If a library has already opened a file there (libffi
    keeps one), that file is not written to. click handles none of this.
    """
    _fill_closed()
    before = sys.stdout, sys.stderr
    sys.stdout = _over(sys.stdout, 1, OutputFile)
    sys.stderr = _over(sys.stderr, 2, _StandardError)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = before


def standard_output() -> int | None:
    """Return the descriptor of standard output; None if it is redirected within the process."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):
        return None


def check_standard_output() -> None:
    """Check that standard output is open for writing; an OSError names it."""
    descriptor = standard_output()
    if descriptor is not None:
        try:
            os.write(descriptor, b"")
        except OSError as error:
            error.filename = STDOUT
            raise


def standard_input_waits() -> bool:
    """Return whether standard input is a file or a pipe with data to read."""
    if sys.__stdin__ is None:  # closed at the start; a library may have taken its descriptor
        return False
    try:
        status = os.fstat(0)
        if stat.S_ISREG(status.st_mode):
            return status.st_size > os.lseek(0, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(status.st_mode) or sys.platform == "win32":
            return False
        import fcntl
        import termios

        waiting = fcntl.ioctl(0, termios.FIONREAD, bytes(4))
        return int.from_bytes(waiting, sys.byteorder) > 0
    except OSError:
        return False


def _fill_closed() -> None:
    """Open closed standard descriptors in the wrong direction, so that using them fails."""
    for fileno, direction in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        if not _is_open(fileno):
            os.set_inheritable(os.open(os.devnull, direction), True)  # takes the lowest free number


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _over(stream: TextIO | None, fileno: int, kind: type[OutputFile]) -> TextIO:
    """Return a new stream over a standard descriptor, if the current one writes to it."""
    encoding = None
    if stream is not None:
        try:
            is_standard = stream.fileno() == fileno
        except (OSError, ValueError):
            is_standard = False
        if not is_standard or (sys.platform == "win32" and stream.isatty()):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            return stream
        stream.flush()
        encoding = stream.encoding
    is_closed = (sys.__stdout__ if fileno == 1 else sys.__stderr__) is None  # since the start
    descriptor = os.open(os.devnull, os.O_RDONLY) if is_closed else fileno
    file = kind(descriptor, STDOUT if fileno == 1 else "<stderr>", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=encoding,
        errors="backslashreplace",  # a file name need not be text in any encoding
        line_buffering=fileno == 2 or file.isatty(),
    )
