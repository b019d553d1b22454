"""The methods of a manager that are the same in both twins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvoffload.policies.base import CachePolicy
from kvoffload.types import BlockHash, Hints, OffloadingEvent, PrepareStoreOutput, Spec_co

from .base import OffloadingManager

if TYPE_CHECKING:
    from ._manager_py import Manager


class ManagerViews(OffloadingManager[Spec_co]):
    """The methods that do not depend on the twin, for the base of all managers of each."""

    __slots__ = ()

    _skeleton: Manager[Spec_co]  # has the state: the manager itself, or its compiled steps
    _base: type[OffloadingManager[Any]]  # whose methods a subclass may override

    def reset_cache(self) -> None:
        """Drop everything, ghosts and adaptive state included, without events.

        The built-in pool starts again at id 0, unless others hold slots of it. A user's backend
        receives one `free` per block, in eviction order.

        The slots of loads and stores under way are handed out again at once: the caller waits for
        these transfers before the reset, since none of them may still read or write.
        """
        self._skeleton._drop_all()

    def stats(self) -> dict[str, int]:
        """Return the counters since construction, and the present numbers of blocks.

        Returns
        -------
        dict of str to int
            ``lookups`` (calls), ``lookup_blocks``, ``hit_blocks``, ``stored_blocks`` (given a
            slot), ``failed_blocks``, ``evicted_blocks``, ``refused_stores`` (calls),
            ``not_admitted``, ``loaded_blocks``; and the present ``resident``, ``pending``,
            ``pinned``, ``free``, ``ghosts``.
        """
        return self._skeleton._stats()

    def __bool__(self) -> bool:
        """Return True, even for an empty manager."""
        return True

    def __repr__(self) -> str:
        """Return the policy, the number of blocks out of the capacity, and their states."""
        name = type(self).__name__
        try:
            policy = type(self.policy).__name__
        except RuntimeError:
            return f"<{name}, not initialised>"
        stats = self.stats()
        return (
            f"<{name} over {policy}: {stats['resident']} of {stats['resident'] + stats['free']} "
            f"blocks resident, {stats['pending']} pending, {stats['pinned']} pinned>"
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._skeleton._backend_object.block_size

    @property
    def medium(self) -> str:
        """Name of the medium, as given in events."""
        return self._skeleton._backend_object.medium

    @property
    def policy(self) -> CachePolicy:
        """The policy that chooses the blocks to evict."""
        return self._skeleton._policy_object

    @property
    def watch(self) -> Any:
        """The ``Watch`` that observes this manager, or None."""
        core = self._skeleton._watch
        return None if core is None else core.watch

    @property
    def events(self) -> list[OffloadingEvent] | None:
        """Copy of the events not yet taken; None when events are off."""
        events = self._skeleton._events
        return None if events is None else list(events)

    @property
    def block_table(self) -> npt.NDArray[np.void]:
        """Statuses as a read-only structured array, ``(n,)`` for n resident blocks, in no order.

        The array is a snapshot and does not show later changes.
        """
        return self._skeleton._block_table()

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        return len(self._skeleton)

    def __contains__(self, block_hash: object) -> bool:
        """Return whether a block is resident."""
        return block_hash in self._skeleton

    def _check(self) -> None:
        """Verify every invariant; raise AssertionError with the broken one."""
        self._skeleton._check()

    # -- what a request tells ----------------------------------------------------------------

    def _overrides(self, call: str) -> bool:
        """Return whether a subclass has a method of its own for a call."""
        return getattr(type(self), call) is not getattr(self._base, call)

    def _begun(self, hashes: list[BlockHash], hints: Hints | None) -> None:
        """Use the blocks of a request for the first time; call a subclass's own `touch`."""
        if self._overrides("touch"):
            self.touch(hashes)
        else:
            self._skeleton._use_first(hashes, hints)

    def _extended(self, added: list[BlockHash]) -> None:
        """Use the blocks that extend a request; call a subclass's own `touch`."""
        if self._overrides("touch"):
            self.touch(added)
        else:
            self._skeleton._use_more(added)

    def _hinted(self, hints: Hints) -> None:
        """Let the watch count a client's hints on a session."""
        watch = self._skeleton._watch
        if watch is not None:
            watch.note_hints(str(hints.source), hints.ends, hints.expect_s is not None)

    def _lookup_told(self, hashes: list[BlockHash], *told: Any) -> int:
        """Call `lookup`, and let the watch hear what the request began with."""
        watch = self._skeleton._watch
        if watch is None:
            return self.lookup(hashes)
        watch.hear(*told)
        try:
            return self.lookup(hashes)
        finally:
            watch.hear(None)

    def _store_last(self, hashes: list[BlockHash]) -> PrepareStoreOutput[Spec_co] | None:
        """Store blocks of a session that ends; call a subclass's own `prepare_store`."""
        if self._overrides("prepare_store"):
            return self.prepare_store(hashes)
        return self._skeleton._store(hashes, is_last=True)
