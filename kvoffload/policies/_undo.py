"""How the Python twins stay all or nothing where a call is interrupted at any of its lines.

How it works
    A call that changes something keeps an `Undo`, a list of calls. Before each change it adds the
    call that takes this change back. Where it ends in an exception, whatever its kind (MemoryError,
    KeyboardInterrupt), these are made, the last first, and the state is the one before.
    To take away needs no memory and so does not fail, but where a block stood cannot be told for
    nothing. So a call whose last part only takes away is finished *instead*, once that part has
    begun: then the state is the one after.
Invariants
    What a call takes back can be taken back where the change was made, half made or not made at
    all, and twice.
Order
    An ordered dict cannot take an entry back into its middle. Evictions take from its oldest end:
    its order up to the last victim is kept, at the price of the blocks that the search has passed
    over. Ghosts are numbered as they come, so theirs can be put in order again.
Limits
    A second KeyboardInterrupt while something is taken back is put off, but not one in between, in
    the code of `Undo` itself; nor can anything be put back where no memory at all is left. `lookup`
    and `touch` do without: they change counters, and orders block by block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Reversible
from itertools import compress, count, islice
from types import TracebackType
from typing import Any

_Call = tuple[Any, ...]


class Undo(list[_Call]):
    """Calls, ``(function, *arguments)``, to make if a ``with`` block ends in an exception."""

    _finishes = False

    def __enter__(self) -> Undo:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if kind is None:
            return None
        # What was finished after all has found its memory.
        is_done = self._finishes and bool(self) and isinstance(error, MemoryError)
        interrupt = None
        while self:
            try:
                self._take_back()
            except KeyboardInterrupt as second:  # noqa: PERF203 - it goes on after that
                interrupt = second
        if interrupt is not None:
            raise interrupt
        return is_done

    def _take_back(self) -> None:
        while self:
            function, *arguments = self[-1]
            function(*arguments)
            del self[-1]

    def instead(self, *call: Any) -> None:
        """Take back nothing from here on; finish by a call."""
        self[:] = [call]
        self._finishes = True

    def leaving(self, ring: OrderedDict[Any, Any], items: Mapping[Any, Any]) -> None:
        """Keep the order of an ordered dict, up to the last of `items` that are about to leave."""
        if items:
            oldest = list(islice(ring, len(items)))
            if oldest != list(items):  # some are passed over
                places = compress(count(1), map(items.__contains__, ring))
                last = next(islice(places, len(items) - 1, None))
                oldest = list(islice(ring, last))
            self.append((put_oldest, ring, items, oldest))

    def returning(self, ghosts: OrderedDict[Any, Any], hashes: Collection[Any]) -> Collection[Any]:
        """Keep the ghosts among `hashes`, whose values rise in the order of the dict."""
        kept = {block_hash: ghosts[block_hash] for block_hash in hashes if block_hash in ghosts}
        if kept:
            self.append((put_in_order, ghosts, kept))
        return kept

    def oldest(self, ring: OrderedDict[Any, Any], n: int) -> None:
        """Keep the `n` oldest of an ordered dict, of which some are about to leave."""
        kept = dict(islice(ring.items(), n))
        self.append((put_oldest, ring, kept, kept))


# -- what takes back -----------------------------------------------------------------------


def drop(mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Take away what was about to be added to a dict."""
    for key in keys:
        mapping.pop(key, None)


def put_oldest(
    ring: OrderedDict[Any, Any], items: Mapping[Any, Any], oldest: Reversible[Any]
) -> None:
    """Put items back, and those that were the oldest into their order."""
    ring.update(items)
    for key in reversed(oldest):
        ring.move_to_end(key, last=False)


def put_in_order(ghosts: OrderedDict[Any, Any], kept: Mapping[Any, Any]) -> None:
    """Put ghosts back, and all into the order of their numbers."""
    ghosts.update(kept)
    for key in sorted(ghosts, key=ghosts.__getitem__):
        ghosts.move_to_end(key)
