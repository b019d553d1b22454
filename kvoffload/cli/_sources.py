"""The trace that a command was given, so that it can be read more than once."""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvoffload.replay import Selection
from kvoffload.traces import Request, Trace, write_trace
from kvoffload.traces.lines import STDIN


@dataclass(frozen=True, slots=True)
class Source:
    """Requests that can be iterated over again and again, and where they came from.

    Attributes
    ----------
    name : str
        What the user calls the trace.
    requests : iterable of Request
        The requests.
    trace : Trace or None
        The file that they were read from first, None if they are generated.
    """

    name: str
    requests: Iterable[Request]
    trace: Trace | None = None

    @property
    def form(self) -> str | None:
        """Form of the trace, None if it is generated."""
        return None if self.trace is None else self.trace.form

    @property
    def block_tokens(self) -> int | None:
        """Tokens a block, where the trace itself says so."""
        return None if self.trace is None else self.trace.block_tokens

    @property
    def bad_lines(self) -> int:
        """Bad lines that the last reading of the file passed over."""
        return 0 if self.trace is None else self.trace.bad_lines


@contextlib.contextmanager
def open_source(
    path: str, *, form: str | None, skip_bad: bool, limit: int | None
) -> Iterator[Source]:
    """Give the first requests of a trace, for as many iterations as one likes.

    What can be read but once, standard input or a named pipe, is kept in a temporary file.
    """
    trace = Trace(path, form=form, skip_bad=skip_bad)
    requests = Selection(trace, limit=limit)
    if path != STDIN and not _is_pipe(path):
        yield Source(path, requests, trace)
        return
    with tempfile.TemporaryDirectory(prefix="kvoffload-") as folder:
        copy = Path(folder, "trace.jsonl")
        write_trace(requests, copy)
        yield Source(path, Trace(copy), trace)


def _is_pipe(path: str) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False  # the reader says what is wrong with it
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)
