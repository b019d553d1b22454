"""A count of the ids that are not prefix-chained, in one pass and in bounded memory.

A chained id stands for its block and all blocks before it. So it follows the same id wherever it
occurs, and occurs once in a prompt. Hashes of only a block's content break both rules as soon as a
block is used in two places, and a replay of them finds hits that no engine has.

The predecessor of an id is remembered for at most `MOST_IDS` ids. They are the ones whose hash is
below a limit, which is halved whenever there are more of them; so they are an even sample of all
ids, and the same one in every run. After the first `WHOLE_BATCHES` of a long trace, only one
batch of requests in `STRIDE` is examined: that takes a twentieth of the time of reading it. The
predecessor of a prompt's first block is ignored: a recording may begin where the accelerator's own
cache ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload._sampling import hash_ids

from .id_map import Ids, flattened

MOST_IDS = 2**14
BATCH = 2**16
"""Blocks that are collected before they are examined."""
WHOLE_BATCHES = 8
STRIDE = 8

HANDFUL = 5
"""Fewest ids, or requests with one, for a warning: hashes may collide."""
MOST_SHARE = 0.01
"""Largest share of unchained ids, or of requests with one, that advice accepts."""

Flags = npt.NDArray[np.bool_]

_LARGEST = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class Chaining:
    """Ids that cannot be prefix-chained.

    Attributes
    ----------
    repeated_ids : int
        Ids that occur more than once; an estimate if there are many.
    unchained_ids : int
        Those among them that follow different ids, or occur twice in a prompt; likewise.
    requests : int
        Examined requests that have a block: all of them, except in long traces.
    unchained_requests : int
        Lower bound of those with such an id: only a sample of many ids is examined.
    """

    repeated_ids: int = 0
    unchained_ids: int = 0
    requests: int = 0
    unchained_requests: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether there are more such ids or requests than collisions of hashes explain."""
        return max(self.unchained_ids, self.unchained_requests) >= HANDFUL

    @property
    def is_broken(self) -> bool:
        """Whether they are too many for figures about the trace to be meaningful."""
        return self.is_suspect and (
            self.unchained_ids > MOST_SHARE * self.repeated_ids
            or self.unchained_requests > MOST_SHARE * self.requests
        )


class ChainingCounter:
    """Count the ids that cannot be prefix-chained, many requests at a time.

    Memory: 26 bytes per remembered id, up to `most_ids` ids, and one batch, the blocks that are
    collected before they are examined.
    """

    def __init__(self, most_ids: int = MOST_IDS, batch: int = BATCH) -> None:
        self._most_ids = most_ids
        self._batch = batch
        self._halvings = 0
        self._rows: list[tuple[int, ...]] = []
        self._gathered = 0
        self._examined = 0  # batches
        self._to_skip = 0  # blocks
        self._requests = 0
        self._unchained_requests = 0
        # The ids, ascending; the least and the greatest predecessor of each, the former above the
        # latter if the id was only seen first; and its flags.
        self._ids = self._least = self._greatest = np.empty(0, dtype=np.uint64)
        self._repeated = self._unchained = np.empty(0, dtype=np.bool_)

    def add(self, hash_ids: tuple[int, ...]) -> None:
        """Add the blocks of one request."""
        if self._to_skip > 0:
            self._to_skip -= len(hash_ids)
            return
        if hash_ids:
            self._rows.append(hash_ids)
            self._gathered += len(hash_ids)
        if self._gathered >= self._batch:
            self._examine()
            self._examined += 1
            if self._examined >= WHOLE_BATCHES:
                self._to_skip = (STRIDE - 1) * self._batch

    def add_each(self, ids: Ids) -> None:
        """Add many requests of one block."""
        self._examine()
        if self._to_skip > 0:
            self._to_skip -= len(ids)
            return
        self._requests += len(ids)
        chosen = ids[self._is_chosen(ids)]
        least = np.full(len(chosen), _LARGEST)
        self._merge(chosen, least, np.zeros(len(chosen), np.uint64), np.arange(len(chosen)))
        self._examined += 1
        if self._examined >= WHOLE_BATCHES:
            self._to_skip = (STRIDE - 1) * len(ids)

    def counts(self) -> Chaining:
        """Examine what is collected and return the counts so far."""
        self._examine()
        return Chaining(
            repeated_ids=int(self._repeated.sum()) << self._halvings,
            unchained_ids=int(self._unchained.sum()) << self._halvings,
            requests=self._requests,
            unchained_requests=self._unchained_requests,
        )

    def _examine(self) -> None:
        if not self._rows:
            return
        ids, lengths = flattened(self._rows)
        starts = np.cumsum(lengths) - lengths
        self._requests += len(self._rows)
        self._rows.clear()
        self._gathered = 0
        chosen = np.flatnonzero(self._is_chosen(ids))
        rows = np.searchsorted(starts, chosen, side="right") - 1
        is_first = starts[rows] == chosen
        before = ids[np.maximum(chosen - 1, 0)]
        self._merge(
            ids[chosen],
            np.where(is_first, _LARGEST, before),
            np.where(is_first, np.uint64(0), before),
            rows,
        )

    def _is_chosen(self, ids: Ids) -> Flags:
        if not self._halvings:
            return np.ones(len(ids), dtype=np.bool_)
        return hash_ids(ids) <= np.uint64((2**64 - 1) >> self._halvings)

    def _merge(self, ids: Ids, least: Ids, greatest: Ids, rows: npt.NDArray[np.int64]) -> None:
        """Add occurrences, in order: ids, their predecessors, and their requests."""
        known = len(self._ids)
        ids = np.concatenate((self._ids, ids))
        if not len(ids):
            return
        order = np.argsort(ids, kind="stable")
        ids, rows = ids[order], np.concatenate((np.full(known, -1), rows))[order]
        is_new = np.concatenate(([True], ids[1:] != ids[:-1]))
        starts = np.flatnonzero(is_new)
        sizes = np.diff(np.append(starts, len(ids)))
        twice = np.concatenate(([False], (rows[1:] == rows[:-1]) & ~is_new[1:]))
        self._least = np.minimum.reduceat(np.concatenate((self._least, least))[order], starts)
        self._greatest = np.maximum.reduceat(
            np.concatenate((self._greatest, greatest))[order], starts
        )
        flags = np.zeros((2, len(ids)), dtype=np.bool_)
        flags[:, :known] = self._repeated, self._unchained
        self._repeated, self._unchained = np.logical_or.reduceat(flags[:, order], starts, axis=1)
        self._repeated |= sizes > 1
        self._unchained |= self._least < self._greatest
        self._unchained |= np.logical_or.reduceat(twice, starts)
        self._ids = ids[starts]
        if self._unchained.any():
            concerned = rows[np.repeat(self._unchained, sizes)]
            self._unchained_requests += len(np.unique(concerned[concerned >= 0]))
        while len(self._ids) > self._most_ids:  # remember half of them
            self._halvings += 1
            kept = self._is_chosen(self._ids)
            self._ids, self._least, self._greatest = (
                part[kept] for part in (self._ids, self._least, self._greatest)
            )
            self._repeated, self._unchained = self._repeated[kept], self._unchained[kept]
