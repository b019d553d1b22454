"""File descriptors above those of the standard streams.

In a daemon whose standard streams are closed, the next files that are opened get the descriptors 0
to 2. A process that it starts has other files there, and a library that writes to standard error
writes to the file that has descriptor 2.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["above_streams"]

LAST_STREAM = 2
"""Descriptor of standard error."""


def above_streams(fd: int) -> int:
    """Return a descriptor of the same file, above those of the standard streams.

    A lower descriptor is closed, also where this raises. Children inherit neither.

    Raises
    ------
    OSError
        If there are too many descriptors.
    """
    if fd > LAST_STREAM:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LAST_STREAM + 1)
    finally:
        os.close(fd)
