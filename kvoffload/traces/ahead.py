"""Lines of a trace, read ahead of the parser to recognise what no single line shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .errors import BadLineError, TraceError
from .rows import Rows


class Ahead:
    """An iterator over lines, some of which may be looked at before their turn.

    Attributes
    ----------
    name : str
        Name of the trace in messages.
    count : int
        Number of the line returned last.
    has_looked : bool
        Whether lines have been looked at before their turn.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._held: deque[tuple[int, bytes | BadLineError | TraceError]] = deque()
        self.name = rows.name
        self.count = 0
        self.has_looked = False

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> bytes:
        if self._held:
            self.count, item = self._held.popleft()
            if isinstance(item, bytes):
                return item
            raise item
        try:
            return next(self._rows)
        finally:
            self.count = self._rows.count

    def look(self, most_bytes: int) -> Iterator[bytes]:
        """Yield lines that keep their turn: errors are passed over, and raised in theirs."""
        self.has_looked = True
        held = 0
        while held < most_bytes:
            item: bytes | BadLineError | TraceError
            try:
                item = next(self._rows)
            except StopIteration:
                return
            except (BadLineError, TraceError) as error:
                item = error
            self._held.append((self._rows.count, item))
            held += len(item) + 100 if isinstance(item, bytes) else 1000
            if isinstance(item, bytes):
                yield item
