"""The requests of a replay: part of a trace, optionally decoded, and the keys of its blocks."""

from __future__ import annotations

import hashlib
import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash
from kvoffload._checks import check_bool, check_instance
from kvoffload.traces import Request
from kvoffload.traces.id_map import IdMap
from kvoffload.traces.objects import ObjectBatch, batches_of

from .arrivals import Arrays, Arrivals, Collector
from .hints import HintOptions, TraceHints

PROGRESS_REQUESTS = 256  # between two calls of the progress function

Blocks = npt.NDArray[np.uint32]
"""Numbers of blocks: their indices among the distinct blocks of a trace."""


@dataclass(frozen=True, slots=True)
class DecodedTrace(Arrays):
    """The blocks of all requests of a trace, in order.

    It takes 4 bytes per block, 8 per distinct one, and 16 per request; with hints 17 more, with
    arrivals 48 and the sessions' names.

    Attributes
    ----------
    starts : (requests + 1,) int64
        Index in `blocks` of each request's first block, then the length of `blocks`.
    blocks : (n,) uint32
        Index of each block in `ids`.
    ids : (unique,) uint64
        The distinct block ids, ascending.
    lengths : (requests,) int64
        Tokens of each request's prompt; 0 with blocks if unknown.
    hints : TraceHints or None
        The clients' hints in every replay; None without hints.
    arrivals : Arrivals or None
        Arrivals of the requests, for a closed loop; None unless asked for.
    """

    starts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    hints: TraceHints | None = None
    arrivals: Arrivals | None = None

    @classmethod
    def of(
        cls,
        requests: Iterable[Request],
        progress: Callable[[int], object] | None = None,
        *,
        hints: HintOptions | None = None,
        arrivals: bool = False,
    ) -> DecodedTrace:
        """Decode a trace; `progress` is called regularly with the number of requests so far.

        `hints` adds the clients' hints, and `arrivals` the arrivals, by which the requests of a
        session are then ordered, else by their place in the trace. Errors are those of
        `TraceHints.of` and `Arrivals.of`; TypeError if an argument is of another type.
        """
        check_instance("requests", requests, Iterable, "an iterable of Request")
        check_instance("progress", progress, Callable | None, "callable or None")
        check_instance("hints", hints, HintOptions | None, "HintOptions or None")
        check_bool("arrivals", arrivals)
        batches = None if arrivals or hints is not None else batches_of(requests)
        if batches is not None:
            return cls._of_objects(batches, progress)
        collector = Collector()
        starts, lengths, numbering = array("q", [0]), array("q"), _Numbering()
        for request in requests:
            if arrivals or hints is not None:
                collector.add(request)
            numbering.add(request.hash_ids)
            starts.append(starts[-1] + len(request.hash_ids))
            lengths.append(request.input_length)
            if progress is not None and len(starts) % PROGRESS_REQUESTS == 0:
                progress(len(lengths))
        ids, blocks = numbering.ascending()
        return cls(
            np.array(starts, dtype=np.int64),
            blocks,
            ids,
            np.array(lengths, dtype=np.int64),
            None
            if hints is None
            else TraceHints.of_collected(collector, hints, by_arrival=arrivals),
            Arrivals.of_collected(collector) if arrivals else None,
        )

    @classmethod
    def _of_objects(
        cls, batches: Iterator[ObjectBatch], progress: Callable[[int], object] | None
    ) -> DecodedTrace:
        """Decode a trace of requests of one block without lengths."""
        numbering, count = _Numbering(), 0
        for _, ids in batches:
            numbering.add_each(ids)
            count += len(ids)
            if progress is not None:
                progress(count)
        ids, blocks = numbering.ascending()
        return cls(np.arange(count + 1), blocks, ids, np.zeros(count, np.int64))

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.starts) - 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all requests."""
        return len(self.blocks)

    @property
    def unique_blocks(self) -> int:
        """Number of distinct blocks."""
        return len(self.ids)

    def full_blocks(self, block_tokens: int) -> DecodedTrace:
        """Return the trace without partly filled blocks, as `Selection` leaves them out."""
        sizes = np.diff(self.starts)
        full = np.where(self.lengths, np.minimum(sizes, self.lengths // block_tokens), sizes)
        is_kept = np.arange(self.num_blocks) < np.repeat(self.starts[:-1] + full, sizes)
        blocks = self.blocks[is_kept]
        is_used = np.zeros(self.unique_blocks, dtype=np.bool_)
        is_used[blocks] = True
        indices = np.cumsum(is_used, dtype=np.uint32) - np.uint32(1)
        starts = np.cumsum(np.append(0, full))
        return replace(self, starts=starts, blocks=indices[blocks], ids=self.ids[is_used])

    def fingerprint(self) -> str:
        """Return a digest of the requests' blocks and lengths in hex, independent of the format."""
        return digest_of(self.arrays())

    def keys(self) -> list[BlockHash]:
        """Return the hash of each distinct block: see `key_of`."""
        return [*map(key_of, self.ids.tolist())]

    def rows(self) -> Iterator[list[int]]:
        """Yield each request's blocks as indices into `ids`."""
        for start, end in itertools.pairwise(self.starts.tolist()):
            yield self.blocks[start:end].tolist()


def key_of(hash_id: int) -> BlockHash:
    """Return the hash of a block: ``sha256(str(id))``."""
    return BlockHash(sha256(b"%d" % hash_id).digest())


class _Numbering:
    """Numbers of the blocks of a trace, many requests at a time.

    Memory: 4 bytes per block and twice that at the end, 12 per distinct one and twice that while
    they are merged, and one batch.
    """

    BATCH = 2**18  # blocks

    def __init__(self) -> None:
        self._numbers = IdMap()  # by id, in the order of their first batches
        self._blocks: list[npt.NDArray[np.uint32]] = []
        self._waiting = array("Q")

    def add(self, hash_ids: tuple[int, ...]) -> None:
        """Add the blocks of a request."""
        self._waiting.extend(hash_ids)
        if len(self._waiting) >= self.BATCH:
            self._number()

    def add_each(self, ids: npt.NDArray[np.uint64]) -> None:
        """Add many blocks."""
        self._waiting.frombytes(ids.tobytes())
        if len(self._waiting) >= self.BATCH:
            self._number()

    def ascending(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return the distinct ids, ascending, and the index there of each block."""
        self._number()
        ids, numbers = self._numbers.items()
        indices = np.empty(len(ids), dtype=np.uint32)
        indices[numbers] = np.arange(len(ids), dtype=np.uint32)
        return ids, indices[np.concatenate(self._blocks)]

    def _number(self) -> None:
        """Give the waiting blocks their numbers."""
        ids, blocks = np.unique(np.array(self._waiting), return_inverse=True)
        numbers = np.empty(len(ids), dtype=np.uint32)
        is_new = np.ones(len(ids), dtype=np.bool_)
        for which, known, places in self._numbers.found(ids):
            numbers[which] = known[places]
            is_new[which] = False
        first, last = len(self._numbers), len(self._numbers) + int(is_new.sum())
        numbers[is_new] = np.arange(first, last, dtype=np.uint32)
        self._numbers.add(ids[is_new], numbers[is_new])
        self._blocks.append(numbers[blocks])
        self._waiting = array("Q")


def digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return a digest of arrays, in their order, in hex."""
    digest = hashlib.sha256()
    for part in arrays.values():
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


class Selection:
    """The first requests of a trace, with all of their blocks or only the full ones.

    Parameters
    ----------
    requests : iterable of Request
        The trace.
    limit : int or None
        Most requests; None for all.
    full_block_tokens : int or None
        The block size in tokens, if given: a prompt keeps its first ``input_length //
        full_block_tokens`` blocks, because an engine stores no partly filled block. A
        prompt of unknown length keeps all.
    cut_length : bool
        Whether a prompt that loses a block becomes as long as its remaining blocks.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        limit: int | None = None,
        full_block_tokens: int | None = None,
        cut_length: bool = False,
    ) -> None:
        self._requests = requests
        self._limit = limit
        self._full_block_tokens = full_block_tokens
        self._cut_length = cut_length

    def batches(self) -> Iterator[ObjectBatch] | None:
        """Return the rows in arrays, if all are taken as they are and are of single objects."""
        is_whole = self._limit is None and self._full_block_tokens is None
        return batches_of(self._requests) if is_whole else None

    def __iter__(self) -> Iterator[Request]:
        most = None if self._limit is None else min(self._limit, sys.maxsize)
        chosen = itertools.islice(self._requests, most)
        size = self._full_block_tokens
        return chosen if size is None else (self._cut(request, size) for request in chosen)

    def _cut(self, request: Request, size: int) -> Request:
        """Return a request with full blocks of a number of tokens."""
        if not request.input_length:
            return request
        full = min(request.input_length // size, len(request.hash_ids))
        length = full * size if self._cut_length else request.input_length
        return replace(request, input_length=length, hash_ids=request.hash_ids[:full])
