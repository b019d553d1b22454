"""Temporary files that vanish with the process, however it ends, on Linux."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from .formats.mooncake import MOONCAKE
from .outputs import OutputFile
from .request import Request
from .writer import trace_line

__all__ = ["Spool", "scratch_file"]

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


class Spool:
    """Requests in a temporary file, to be read in another order; in memory 16 bytes each.

    `stream` and `path` are those of a `scratch_file`. A request is written as the eight bytes of
    each id, and then as a line without ids.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream, self._path = stream, path
        self._offsets, self._lengths = array("q"), array("q")  # bytes; blocks
        self._end = 0

    def add(self, request: Request) -> None:
        """Write a request."""
        self._offsets.append(self._end)
        self._lengths.append(len(request.hash_ids))
        self._end += self._stream.write(array("Q", request.hash_ids))
        self._end += self._stream.write(trace_line(replace(request, hash_ids=())))

    def requests(self, order: Iterable[int]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Read requests in an order of their numbers, from 0; yield each and its ids apart."""
        self._stream.flush()
        parse = MOONCAKE.new_parser()
        with Path(self._path).open("rb") as file:
            for index in order:
                file.seek(self._offsets[index])
                ids = np.frombuffer(file.read(8 * self._lengths[index]), np.uint64)
                yield parse(file.readline()), tuple(ids.tolist())
