"""What can be seen of a manager of either twin, and its reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.policies.base import CachePolicy
from kvoffload.types import OffloadingEvent


class ManagerViews:
    """The public surface that does not depend on the twin."""

    __slots__ = ()

    _skeleton: Any  # has the state: the manager itself, or its compiled steps
    _backend_object: Any

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
        counters: dict[str, int] = self._skeleton._stats()
        return counters

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
        size: int = self._backend_object.block_size
        return size

    @property
    def medium(self) -> str:
        """Name of the medium, as given in events."""
        medium: str = self._backend_object.medium
        return medium

    @property
    def policy(self) -> CachePolicy:
        """The policy that chooses the blocks to evict."""
        policy: CachePolicy = self._skeleton._policy_object
        return policy

    @property
    def watch(self) -> Any:
        """The ``Watch`` that observes this manager, or None."""
        core = self._skeleton._watch
        return None if core is None else core.watch

    @property
    def events(self) -> list[OffloadingEvent] | None:
        """Copy of the events not yet taken; None when events are off."""
        events: list[OffloadingEvent] | None = self._skeleton._events
        return None if events is None else list(events)

    @property
    def block_table(self) -> npt.NDArray[np.void]:
        """Statuses as a read-only structured array, ``(n,)`` for n resident blocks, in no order.

        The array is a snapshot and does not show later changes.
        """
        table: npt.NDArray[np.void] = self._skeleton._block_table()
        return table
