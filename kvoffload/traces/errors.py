"""What can be wrong with a trace."""

from __future__ import annotations

from kvoffload._printable import printable
from kvoffload.errors import OffloadError


class BadLineError(ValueError):
    """Say that a line breaks the format's rules; the message is the rule and the value."""


class TraceError(OffloadError, ValueError):
    """Say why a trace cannot be read: ``FILE:LINE: rule, value``.

    Parameters
    ----------
    file : str
        Name of the trace, ``<stdin>`` for standard input.
    line : int or None
        Number of the line, from 1; None where the fault is the file's as a whole.
    rule : str
        The rule that is broken and the value that breaks it.

    Attributes
    ----------
    file, line, rule
        As given.
    """

    def __init__(self, file: str, line: int | None, rule: str) -> None:
        super().__init__(file, line, rule)
        self.file = file
        self.line = line
        self.rule = rule

    def __str__(self) -> str:
        place = printable(self.file) if self.line is None else f"{printable(self.file)}:{self.line}"
        return f"{place}: {self.rule}"
