"""Traces of single objects, many at a time: a time, an object and its size per row.

Researchers publish caches' traces as text, ``time,object,size``, or in libCacheSim's binary format.
An object becomes a block, and its row a request for it, whatever its size. Rows come in batches of
arrays, since a request per row would take longer than all else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from .errors import TraceError
from .lines import Bytes
from .request import MAX_MILLISECONDS, Request

OBJECTS = "objects"
"""Name of the format of text."""

ObjectBatch = tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64]]
"""Times in milliseconds, and ids, of some rows."""

_PIECE = 2**20
_ROW = re.compile(rb"\s*\d{1,20}(?:\.\d{1,9})?\s*,\s*[\w.:/-]{1,200}\s*,\s*\d{1,20}\s*")
_HEADER = re.compile(
    rb"\s*(?:clock_?)?(?:time(?:stamp)?|ts)\s*,\s*(?:obj(?:ect)?(?:_?id)?|key|id)\s*,\s*"
    rb"(?:obj_?|object_?)?size\s*",
    re.IGNORECASE,
)


def batches_of(requests: object) -> Iterator[ObjectBatch] | None:
    """Return the batches of requests that are rows of objects; None for all others."""
    find = getattr(requests, "batches", None)
    return None if find is None else find()


def are_objects(line: bytes) -> bool:
    """Return whether the first line of a file is a row of an object, or names their columns."""
    return (_ROW.fullmatch(line) or _HEADER.fullmatch(line)) is not None


def object_batches(path: str) -> Iterator[ObjectBatch]:
    """Yield the rows of a file of text, ``-`` for standard input; time counts from the first.

    An object that is not a number below 2**63 is named by a digest.

    Raises
    ------
    TraceError
        If the file cannot be read to its end, or a row is no object.
    """
    first: float | None = None
    rest, line = b"", 1
    with Bytes(path) as file:
        while True:
            piece = file.read_bytes(_PIECE)
            data = rest + piece
            end = data.rfind(b"\n") + 1 if piece else len(data)
            whole, rest = data[:end], data[end:]
            if len(rest) > _PIECE:
                raise TraceError(file.name, line, f"a row must be at most {_PIECE} bytes long")
            if line == 1 and whole:
                whole = whole.removeprefix(b"\xef\xbb\xbf")  # as of some editors
                header = whole.partition(b"\n")[0]
                if _HEADER.fullmatch(header):
                    whole, line = whole[len(header) + 1 :], 2
            if whole.strip():
                seconds, ids = _columns(whole, file.name, line)
                first = float(seconds[0]) if first is None else first
                times = np.maximum(0.0, np.round((seconds - first) * 1000))
                if times.max() >= MAX_MILLISECONDS:  # which as a float is 2**63
                    rule = f"a time must be at most {MAX_MILLISECONDS} ms after the first"
                    raise TraceError(file.name, None, f"{rule}, got a later one")
                yield times, ids
            line += whole.count(b"\n")
            if not piece:
                return


def _columns(text: bytes, name: str, line: int) -> ObjectBatch:
    """Return the times, seconds, and the ids of rows."""
    rows = text.replace(b"\r", b"").strip(b"\n")
    count = rows.count(b"\n") + 1
    cells = rows.replace(b"\n", b",")
    are_numbers = rows.translate(None, b"0123456789") == b"\n".join([b",,"] * count)
    if are_numbers and b",," not in b",%b," % cells:
        columns = np.fromstring(cells.decode(), np.uint64, sep=",").reshape(count, 3)
        if int(columns[:, 1].max()) < 2**63:
            return columns[:, 0].astype(np.float64), columns[:, 1].copy()
    seconds, ids = [], []
    for offset, row in enumerate(rows.split(b"\n")):
        if not row.strip():
            continue
        if not _ROW.fullmatch(row):
            raise TraceError(name, line + offset, "must be a row of time,object,size")
        time, key, _ = row.split(b",")
        seconds.append(float(time))
        ids.append(_id_of(key.strip()))
    return np.array(seconds), np.array(ids, np.uint64)


def _id_of(key: bytes) -> int:
    number = int(key) if key.isdigit() else 2**63
    if number < 2**63:
        return number
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def requests_of(batches: Iterable[ObjectBatch]) -> Iterator[Request]:
    """Yield a request of one block for each row."""
    for times, ids in batches:
        for time, object_id in zip(times.astype(np.int64).tolist(), ids.tolist(), strict=True):
            yield Request(time, 0, 0, (object_id,))
