"""A trace decoded once, as arrays, for many replays of it."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash
from kvoffload.traces import Request

PROGRESS_REQUESTS = 256  # between two calls of the progress function


@dataclass(frozen=True, slots=True)
class DecodedTrace:
    """The blocks of all requests in order.

    It takes 4 bytes per block, 8 per distinct one, and 16 per request.

    Attributes
    ----------
    starts : (requests + 1,) int64
        Index in `blocks` of each request's first block, then the length of `blocks`.
    blocks : (n,) uint32
        Index of each block in `ids`.
    ids : (unique,) uint64
        The distinct block ids, ascending.
    lengths : (requests,) int64
        Prompt of each request, tokens; 0 with blocks where it is not known.
    """

    starts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, requests: Iterable[Request], progress: Callable[[int], object] | None = None
    ) -> DecodedTrace:
        """Decode a trace; `progress` is called regularly with the number of requests so far."""
        starts, lengths, flat = array("q", [0]), array("q"), array("Q")
        for request in requests:
            flat.extend(request.hash_ids)
            starts.append(len(flat))
            lengths.append(request.input_length)
            if progress is not None and len(starts) % PROGRESS_REQUESTS == 0:
                progress(len(lengths))
        ids, blocks = np.unique(np.frombuffer(flat, dtype=np.uint64), return_inverse=True)
        return cls(
            np.array(starts, dtype=np.int64),
            blocks.astype(np.uint32),
            ids,
            np.array(lengths, dtype=np.int64),
        )

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

    def fingerprint(self) -> str:
        """Return a digest of the requests' blocks and lengths in hex, whatever the format."""
        digest = hashlib.sha256()
        for part in self.arrays().values():
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).data)
        return digest.hexdigest()

    def keys(self) -> list[BlockHash]:
        """Return the hash of each distinct block: ``sha256(str(id))``."""
        return [BlockHash(sha256(b"%d" % hash_id).digest()) for hash_id in self.ids.tolist()]

    def rows(self) -> Iterator[list[int]]:
        """Yield each request's blocks as indices into `ids`."""
        for start, end in itertools.pairwise(self.starts.tolist()):
            yield self.blocks[start:end].tolist()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name: ``DecodedTrace(**trace.arrays())`` equals the trace."""
        return {name: getattr(self, name) for name in self.__slots__}
