"""A writer of requests in the Mooncake format."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from kvoffload._extras import require

from .lines import zstd_module
from .outputs import open_output
from .request import Request

_encode = json.JSONEncoder(separators=(",", ":")).encode


def trace_line(request: Request) -> bytes:
    """Return a request as a line of a Mooncake-format trace, line end included."""
    row: dict[str, object] = {
        "timestamp": request.timestamp,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hash_ids,
    }
    for name in ("session", "parent", "think", "service", "stop", "expect", "type", "turn"):
        value = getattr(request, name)
        if value is not None:
            row[name] = value
    if request.ends:
        row["ends"] = True
    return _encode(row).encode() + b"\n"


def write_requests(requests: Iterable[Request], stream: BinaryIO) -> int:
    """Write requests to an open binary stream, one line each.

    Returns
    -------
    int
        How many were written.
    """
    written = 0
    for request in requests:
        stream.write(trace_line(request))
        written += 1
    return written


def write_trace(requests: Iterable[Request], path: str | os.PathLike[str]) -> int:
    """Write requests to a file, which is replaced if it exists.

    Equal requests make equal bytes. If writing or the iterable fails, the file stays as it was. A
    link stays, and its target is replaced; a device or a pipe is written to directly.

    Parameters
    ----------
    requests : iterable of Request
        In the order in which they are to be replayed.
    path : str or os.PathLike
        Compressed if it ends in ``.gz`` or ``.zst``.

    Returns
    -------
    int
        How many requests were written.

    Raises
    ------
    OSError
        If the file cannot be written; it names the file.
    MissingExtraError
        For ``.zst`` without the ``cli`` extra.
    """
    with packed_output(path) as stream:
        return write_requests(requests, stream)


@contextlib.contextmanager
def packed_output(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Provide a stream to a file as `open_output` does, compressed as the file's name says."""
    suffix = Path(path).suffix
    zstd = require(zstd_module(), "a zstandard trace") if suffix == ".zst" else None
    with contextlib.ExitStack() as opened:
        stream = opened.enter_context(open_output(path))
        if suffix == ".gz":
            packed = gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0)
            stream = cast("BinaryIO", opened.enter_context(packed))
        elif zstd is not None:
            stream = cast("BinaryIO", opened.enter_context(zstd.ZstdFile(stream, "wb")))
        yield stream
