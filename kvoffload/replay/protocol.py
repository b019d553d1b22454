"""One request through a manager, in the order in which an engine calls it.

With the block hashes ``h`` of the request, of which the accelerator's own cache has the first ``d``
(and ``m = h[d:]``): ``touch(h)``; ``n = lookup(m)``; if n, ``prepare_load(m[:n])`` and
``complete_load(m[:n])``; ``prepare_store(h)``; ``touch(h)``. The caller of `serve` completes the
store, at once or some requests later.
"""

from __future__ import annotations

from typing import NamedTuple

from kvoffload import BlockHash, OffloadingManager, PrepareStoreOutput

__all__ = ["Served", "serve"]


class Served(NamedTuple):
    """A manager's answers to a request.

    Attributes
    ----------
    hits : int
        Blocks found by `lookup`, and loaded.
    output : PrepareStoreOutput or None
        What `prepare_store` returned; its ``block_hashes_to_store`` wait for `complete_store`.
    """

    hits: int
    output: PrepareStoreOutput | None

    @property
    def to_store(self) -> list[BlockHash]:
        """The blocks that wait for `complete_store`."""
        return [] if self.output is None else self.output.block_hashes_to_store

    @property
    def evicted(self) -> list[BlockHash]:
        """The blocks that were evicted."""
        return [] if self.output is None else self.output.block_hashes_evicted

    @property
    def refused(self) -> int:
        """Offers that were refused: 0 or 1."""
        return int(self.output is None)


def serve(manager: OffloadingManager, request: list[BlockHash], on_device: int = 0) -> Served:
    """Pass a request through a manager, except for the completion of its store.

    Parameters
    ----------
    manager : OffloadingManager
        Any manager.
    request : list of BlockHash
        The request's blocks, first block first.
    on_device : int
        How many leading blocks the accelerator's own cache has: the manager is not asked for them.

    Complexity: that of the manager's calls.
    """
    manager.touch(request)
    missing = request[on_device:] if on_device else request
    hits = manager.lookup(missing)
    if hits:
        loaded = missing[:hits]
        manager.prepare_load(loaded)
        manager.complete_load(loaded)
    output = manager.prepare_store(request)
    manager.touch(request)
    return Served(hits, output)
