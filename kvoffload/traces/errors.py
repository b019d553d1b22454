"""The errors of traces."""

from __future__ import annotations

from kvoffload._printable import printable
from kvoffload.errors import OffloadError


class BadLineError(ValueError):
    """A line breaks a rule of its format; the message is the rule and the value."""


class TraceError(OffloadError, ValueError):
    """A trace cannot be read; the message is ``FILE:LINE: rule, value``.

    Parameters
    ----------
    file : str
        Name of the trace, ``<stdin>`` for standard input.
    line : int or None
        Number of the line, from 1; None for an error of the whole file.
    rule : str
        The broken rule and the value that breaks it.

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
        location = (
            printable(self.file) if self.line is None else f"{printable(self.file)}:{self.line}"
        )
        return f"{location}: {self.rule}"
