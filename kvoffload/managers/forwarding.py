"""A manager that passes every call on to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvoffload.types import BlockHash, Hints, OffloadingEvent, PrepareStoreOutput, Spec_co

from .base import OffloadingManager


class ForwardingManager(OffloadingManager[Spec_co]):
    """A manager that wraps another; a subclass adds to some of the calls.

    A request calls its methods, and tells the other of its beginning and its end.

    Attributes
    ----------
    manager : OffloadingManager
        The other one; the subclass sets it.
    """

    manager: OffloadingManager[Spec_co]

    def lookup(self, hashes: Iterable[bytes]) -> int:
        """Call the manager's method."""
        return self.manager.lookup(hashes)

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Call the manager's method."""
        self.manager.touch(hashes)

    def release(self, hashes: Iterable[bytes]) -> None:
        """Call the manager's method."""
        self.manager.release(hashes)

    def prepare_load(self, hashes: Iterable[bytes]) -> Spec_co:
        """Call the manager's method."""
        return self.manager.prepare_load(hashes)

    def complete_load(self, hashes: Iterable[bytes]) -> None:
        """Call the manager's method."""
        self.manager.complete_load(hashes)

    def prepare_store(self, hashes: Iterable[bytes]) -> PrepareStoreOutput[Spec_co] | None:
        """Call the manager's method."""
        return self.manager.prepare_store(hashes)

    def complete_store(self, hashes: Iterable[bytes], success: bool = True) -> None:
        """Call the manager's method."""
        self.manager.complete_store(hashes, success)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Call the manager's method."""
        return self.manager.take_events()

    # -- what a request tells ----------------------------------------------------------------

    @property
    def _skeleton(self) -> Any:
        return self.manager._skeleton

    def _begun(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        self.manager._begun(hashes, hints)

    def _extended(self, added: list[BlockHash]) -> None:
        self.manager._extended(added)

    def _hinted(self, hints: Hints) -> None:
        self.manager._hinted(hints)

    def _lookup_told(self, hashes: list[BlockHash], *told: Any) -> int:
        return self.manager._lookup_told(hashes, *told)

    def _store_last(self, hashes: list[BlockHash]) -> PrepareStoreOutput[Spec_co] | None:
        return self.manager._store_last(hashes)
