"""Requests in the order of their timestamps, for logs that are written when requests end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from .request import Request
from .scratch import Spool, scratch_file


def sorted_by_time(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield requests in the order of their timestamps; equal ones keep their order.

    All are read first, into a temporary file; in memory they take some 50 bytes each, however many
    blocks they have. An OSError names the folder of that file.
    """
    times = array("d")
    with scratch_file() as (stream, path):
        spool = Spool(stream, path)
        for request in requests:
            times.append(request.timestamp)
            spool.add(request)
        for request, ids in spool.read(np.argsort(times, kind="stable")):
            yield replace(request, hash_ids=ids)


def counted_from_first(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield requests whose times count from that of the first; earlier ones become 0."""
    first: int | float | None = None
    for request in requests:
        if first is None:
            first = request.timestamp
        yield replace(request, timestamp=max(0, request.timestamp - first))
