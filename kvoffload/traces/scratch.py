"""Temporary files that vanish with the process, however it ends, on Linux."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from .outputs import OutputFile

__all__ = ["scratch_file"]

PREFIX = "kvoffload-"
NAMELESS = "/proc/{}/fd/{}"  # where Linux lists the open files of a process


@contextlib.contextmanager
def scratch_file() -> Iterator[tuple[BinaryIO, str]]:
    """Provide a stream to a new temporary file, and a path to read it from repeatedly.

    Processes that this one starts can read it too. It is gone when the block ends. On Linux it has
    no name in any folder and does not survive a killed process; elsewhere a killed process leaves
    it behind. If no folder for it exists or it cannot be written, an OSError names the folder.
    """
    folder = tempfile.gettempdir()
    with contextlib.ExitStack() as opened:
        descriptor = opened.enter_context(tempfile.TemporaryFile(prefix=PREFIX)).fileno()
        path = NAMELESS.format(os.getpid(), descriptor)
        if not Path(path).exists():
            within = opened.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            named = opened.enter_context(Path(within, "file").open("xb"))
            descriptor, path = named.fileno(), named.name
        file = OutputFile(descriptor, f"a temporary file in {folder}", closefd=False)
        stream = io.BufferedWriter(file)
        try:
            yield cast("BinaryIO", stream), path
        finally:
            file.dropping = True
            stream.close()
