"""The block ids of many requests in arrays, and a map from ids to values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def flattened(rows: Sequence[tuple[int, ...]]) -> tuple[Ids, Numbers]:
    """Return the ids of rows, one row after the other, and the length of each row."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    blocks = itertools.chain.from_iterable(rows)
    return np.fromiter(blocks, dtype=np.uint64, count=int(lengths.sum())), lengths


class IdMap:
    """A map from ids to values, exact; it takes twice the size of its items while it is merged.

    Sorted arrays, each at least twice as long as the next, with a value beside each id; a lookup is
    a binary search in each.

    Complexity: O(log² n) per id, amortised.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Ids, npt.NDArray[Any]]] = []

    def __len__(self) -> int:
        return sum(len(run) for run, _ in self._runs)

    def found(self, ids: Ids) -> Iterator[tuple[Numbers, npt.NDArray[Any], Numbers]]:
        """Find those of distinct ids that are in the map.

        Yields, several times, the positions of some of the ids, and an array that holds their
        values, which may be replaced, with their positions there.
        """
        for run, values in self._runs:
            places = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            which = np.flatnonzero(run[places] == ids)
            yield which, values, places[which]

    def add(self, ids: Ids, values: npt.NDArray[Any]) -> None:
        """Add ids that are sorted, distinct and not in the map."""
        while self._runs and len(self._runs[-1][0]) < 2 * len(ids):
            ids, values = _merged(self._runs.pop(), (ids, values))
        if len(ids):
            self._runs.append((ids, values))

    def items(self) -> tuple[Ids, npt.NDArray[Any]]:
        """Return all ids, ascending, and their values; both empty for an empty map."""
        while len(self._runs) > 1:
            self._runs.append(_merged(self._runs.pop(), self._runs.pop()))
        empty = np.empty(0, np.uint64)
        return self._runs[0] if self._runs else (empty, empty)


def _merged(
    one: tuple[Ids, npt.NDArray[Any]], other: tuple[Ids, npt.NDArray[Any]]
) -> tuple[Ids, npt.NDArray[Any]]:
    """Return two sorted arrays, and the values beside them, as one."""
    ids, values = (np.concatenate(parts) for parts in zip(one, other, strict=True))
    order = np.argsort(ids, kind="stable")
    return ids[order], values[order]
