"""Traces of libCacheSim in its binary format, oracleGeneral: a record per access to an object.

Source: ``oracleGeneralBin.h`` and ``traceConvOracleGeneral.cpp`` of 1a1a11a/libCacheSim. Records
follow each other without a header, packed and little-endian. Each holds the clock, seconds; the
object's id and its size in bytes; and when the object is accessed next, as the number of that
record, counted from 1, or -1 if it never is. An object becomes a block, and its record a request
for it.

Any bytes could be records, so only a file's name or the caller selects this format.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvoffload.errors import describe

from .errors import TraceError
from .lines import Bytes
from .objects import ObjectBatch
from .request import Request

ORACLE_GENERAL = "oracle-general"
"""Name of the format."""

RECORDS = np.dtype([("seconds", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
NEVER = -1  # accessed again
MAX_SECONDS = 2**32 - 1

_BATCH = 2**13  # records that are read or written at a time: 192 KiB
_NAME = re.compile(r"\.oracleGeneral(\.bin)?(\.gz|\.zst)?\Z")


def is_named_oracle_general(path: str) -> bool:
    """Return whether a file's name ends as libCacheSim's traces do, compressed or not."""
    return _NAME.search(path) is not None


def record_batches(path: str) -> Iterator[ObjectBatch]:
    """Yield the records of a file, ``-`` for standard input, as rows of objects.

    Time counts from the first record, and is never negative. The sizes of objects are not used.

    Raises
    ------
    TraceError
        If the file cannot be opened or read to its end, or its last record is cut off.
    """
    first: int | None = None
    offset = 0  # bytes, decompressed
    with Bytes(path) as file:
        while piece := file.read_bytes(_BATCH * RECORDS.itemsize):
            rest = len(piece) % RECORDS.itemsize
            records = np.frombuffer(piece[: len(piece) - rest], RECORDS)
            if len(records):
                seconds = records["seconds"].astype(np.float64)
                first = int(seconds[0]) if first is None else first
                yield 1000 * np.maximum(0.0, seconds - first), records["id"].astype(np.uint64)
            offset += len(piece)
            if rest:
                rule = f"a record must have {RECORDS.itemsize} bytes, got {rest}"
                raise TraceError(file.name, None, f"{rule} at byte {offset - rest}")


def write_oracle_general(requests: Iterable[Request], stream: BinaryIO) -> int:
    """Write the blocks of requests as accesses to objects of size 1, in libCacheSim's format.

    Each block becomes a record, in order, whether its prompt fills it or not; a request without
    blocks makes no record. Reading the records gives the same ids in the same order; lengths and
    sessions are lost, and times are cut to whole seconds.

    All requests are read before anything is written, since a record says when its object is
    accessed next. Until then each record takes some 30 bytes of memory.

    Parameters
    ----------
    requests : iterable of Request
        In the order in which they are to be replayed.
    stream : binary stream
        Open for writing.

    Returns
    -------
    int
        How many records were written.

    Raises
    ------
    OverflowError
        If a timestamp is negative, or 2**32 seconds or more.
    """
    ids, times = array("Q"), array("I")
    for request in requests:
        seconds = int(request.timestamp // 1000)
        if not 0 <= seconds <= MAX_SECONDS:
            shown = describe(request.timestamp)
            raise OverflowError(f"timestamp must be >= 0 and below 2**32 seconds, got {shown} ms")
        ids.extend(request.hash_ids)
        times.extend(repeat(seconds, len(request.hash_ids)))
    objects, clock = np.asarray(ids), np.asarray(times)
    accesses = _next_accesses(objects)
    for start in range(0, len(objects), _BATCH):
        part = slice(start, start + _BATCH)
        records = np.empty(len(objects[part]), dtype=RECORDS)
        records["seconds"], records["id"] = clock[part], objects[part]
        records["size"], records["next"] = 1, accesses[part]
        stream.write(records.tobytes())
    return len(objects)


def _next_accesses(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the number of the next record of the same id, from 1, or `NEVER`, per record."""
    accesses = np.full(len(ids), NEVER, dtype=np.int64)
    order = np.argsort(ids, kind="stable")  # records of one id, in their order, side by side
    for start in range(0, len(ids) - 1, _BATCH):
        later = order[start + 1 : start + 1 + _BATCH]
        earlier = order[start : start + len(later)]
        again = ids[earlier] == ids[later]
        accesses[earlier[again]] = later[again] + 1
    return accesses
