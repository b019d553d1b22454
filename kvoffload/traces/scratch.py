"""Temporary files that vanish with the process, however it ends, on Linux."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from kvoffload._output_file import OutputFile

from .formats.mooncake import MOONCAKE
from .request import Request
from .writer import trace_line

PREFIX = "kvoffload-"
_WORD_BYTES = 8
NAMELESS = "/proc/{}/fd/{}"  # where Linux lists the open files of a process


Blocks = tuple[int, ...]


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
    """Requests in a temporary file, to be read repeatedly and in any order.

    `stream` and `path` are those of a `scratch_file`. A request is written as the number of its ids
    and the ids, eight bytes each, and then as a line without ids.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self._stream, self._path = stream, path
        self._starts = array("q", (0,))  # of the requests in the file, and of the next one

    def add(self, request: Request) -> None:
        """Write a request."""
        words = array("Q", (len(request.hash_ids), *request.hash_ids))
        size = self._stream.write(words)
        size += self._stream.write(trace_line(replace(request, hash_ids=())))
        self._starts.append(self._starts[-1] + size)

    def __iter__(self) -> Iterator[Request]:
        for request, ids in self.read():
            yield replace(request, hash_ids=ids)

    def read(self, order: Iterable[int] | None = None) -> Iterator[tuple[Request, Blocks]]:
        """Yield the requests in an order of their numbers, or as added, each with its ids apart.

        Nothing may be added meanwhile.
        """
        self._stream.flush()
        parse = MOONCAKE.new_parser()
        with Path(self._path).open("rb") as file:
            for number in range(len(self._starts) - 1) if order is None else order:
                file.seek(self._starts[number])
                count = int.from_bytes(file.read(_WORD_BYTES), sys.byteorder)
                ids = np.frombuffer(file.read(_WORD_BYTES * count), np.uint64)
                yield parse(file.readline()), tuple(ids.tolist())
