"""A trace file as something to iterate over, as often as one likes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .errors import BadLineError, TraceError
from .formats import FORMATS, Parser, recognise
from .lines import MAX_LINE_BYTES, STDIN, Lines
from .request import Request


class Trace:
    """A trace file; iterating over it reads its requests one by one, in the order of the file.

    Nothing is read before iteration and nothing is kept, so a trace may be larger than memory. Each
    iteration opens the file anew; standard input can be iterated over once. Blank lines are passed
    over. A file may be plain or compressed with gzip or zstandard, which is recognised by its first
    bytes.

    Parameters
    ----------
    path : str or os.PathLike
        The file; ``-`` is standard input.
    format : str, optional
        ``"mooncake"``, ``"lmcache"``, ``"bailian"`` or ``"hex"``; by default the one that its
        first good line is in.
    skip_bad : bool
        Pass over the lines that break the format's rules, and count them in `bad_lines`. Where a
        compressed file is cut off, what was readable counts, and the cut as one bad line.
    max_line_bytes : int
        Longest line that is accepted, bytes.

    Attributes
    ----------
    name : str
        What messages call the trace.
    bad_lines : int
        Bad lines passed over by the iteration begun last.
    format : str or None
        The format that was given, or that the iteration begun last recognised.
    block_tokens : int or None
        Tokens a block, where the trace itself says so, as the iteration begun last knows it.

    Raises
    ------
    ValueError
        If there is no format of that name.
    TraceError
        From iteration: the file cannot be opened or read, a line breaks a rule (without
        `skip_bad`), or the trace holds no request.

    Notes
    -----
    Not safe to iterate over from two threads at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        skip_bad: bool = False,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.path = os.fspath(path)
        self.name = "<stdin>" if self.path == STDIN else self.path
        self.skip_bad = skip_bad
        self.bad_lines = 0
        self.format = format
        self.block_tokens: int | None = None
        self._given_format = format
        self._max_line_bytes = max_line_bytes
        if format is not None and format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")

    def __iter__(self) -> Iterator[Request]:
        self.bad_lines = 0
        self.block_tokens = None
        self.format = self._given_format
        parse: Parser = FORMATS[self.format or next(iter(FORMATS))].new_parser()
        requests = 0
        with Lines(self.path, self._max_line_bytes) as lines:
            while True:
                try:
                    line = next(lines)
                    if requests == 0 and self._given_format is None:
                        recognised = recognise(line)
                        self.format, parse = recognised.name, recognised.new_parser()
                    request = parse(line)
                except StopIteration:
                    break
                except (BadLineError, TraceError) as error:
                    if not self.skip_bad:
                        if isinstance(error, TraceError):
                            raise
                        raise TraceError(self.name, lines.number, str(error)) from None
                    self.bad_lines += 1
                    continue
                requests += 1
                self.block_tokens = parse.block_tokens
                yield request
            if requests == 0:
                found = f"{self.bad_lines} bad lines" if self.bad_lines else "an empty file"
                rule = f"a trace must hold at least one request, got {found}"
                raise TraceError(self.name, max(1, lines.number), rule)
