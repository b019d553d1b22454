"""One request through a manager, in the order in which an engine calls it.

It begins, looks up what the accelerator's own cache does not have, loads what is found, stores
the rest and finishes. The caller of `serve` completes the store, at once or some requests later.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload import BlockHash, OffloadingManager, PrepareStoreOutput, Request

__all__ = ["Served", "serve"]


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
