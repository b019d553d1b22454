"""One request through a manager, in the order in which an engine calls it.

It begins, looks up what the accelerator's own cache does not have, loads what is found, stores
the rest and finishes. The caller of `serve` completes the store, at once or some requests later.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload import BlockHash, OffloadingManager, PrepareStoreOutput, Request

from .decoded import DecodedTrace

__all__ = ["Served", "serve", "serve_all"]

#: Requests that are served before Ctrl-C is heard.
ROWS_AT_ONCE = 1024


@dataclass(slots=True)
class Served:
    """A manager's answers to a request.

    Attributes
    ----------
    hits : int
        Blocks found by `Request.lookup`, and loaded.
    output : PrepareStoreOutput or None
        What `Request.prepare_store` returned.
    request : Request
        The request, which has finished; its store waits for `Request.complete_store`.
    """

    hits: int
    output: PrepareStoreOutput | None
    request: Request

    @property
    def to_store(self) -> list[BlockHash]:
        """The blocks that got a slot."""
        return [] if self.output is None else self.output.block_hashes_to_store

    @property
    def evicted(self) -> list[BlockHash]:
        """The blocks that were evicted."""
        return [] if self.output is None else self.output.block_hashes_evicted

    @property
    def refused(self) -> int:
        """Offers that were refused: 0 or 1."""
        return int(self.output is None)

    def complete(self) -> None:
        """End the store."""
        self.request.complete_store()


def serve(manager: OffloadingManager, hashes: list[BlockHash], on_device: int = 0) -> Served:
    """Pass a request through a manager, except for the completion of its store.

    Parameters
    ----------
    manager : OffloadingManager
        Any manager.
    hashes : list of BlockHash
        The request's blocks, first block first.
    on_device : int
        How many leading blocks the accelerator's own cache has: the manager is not asked for them.

    Complexity: that of the manager's calls.
    """
    request = manager.begin(hashes)
    hits = request.lookup(on_device)
    if hits:
        request.prepare_load(on_device, on_device + hits)
        request.complete_load(on_device, on_device + hits)
    output = request.prepare_store()
    request.finish()
    return Served(hits, output, request)


def serve_all(
    manager: OffloadingManager,
    keys: list[BlockHash],
    trace: DecodedTrace,
    on_device: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Pass the requests of a trace through a manager, each store complete before the next one.

    A compiled manager takes many requests in one call, with the same results to the block.

    Parameters
    ----------
    manager : OffloadingManager
        Any manager.
    keys : list of BlockHash
        ``trace.keys()``.
    trace : DecodedTrace
        The requests.
    on_device : (requests,) int64
        Leading blocks of each that the accelerator's own cache has.

    Returns
    -------
    (requests,) int64
        The hits of each.

    Complexity: that of the manager's calls.
    """
    hits = np.zeros(trace.num_requests, dtype=np.int64)
    serve_rows = getattr(manager, "_serve_rows", None)
    nodes = np.zeros(len(keys), dtype=np.uint32)
    for start in range(0, trace.num_requests, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, trace.num_requests)
        starts, first = trace.starts[start : end + 1], on_device[start:end]
        if serve_rows is not None:
            served = serve_rows(keys, starts, trace.blocks, first, nodes)
            if served is not None:
                hits[start:end] = served
                continue
        rows = itertools.pairwise(starts.tolist())
        for number, ((row, row_end), before) in enumerate(zip(rows, first.tolist(), strict=True)):
            hashes = [keys[block] for block in trace.blocks[row:row_end].tolist()]
            one = serve(manager, hashes, before)
            one.complete()
            hits[start + number] = one.hits
    return hits
