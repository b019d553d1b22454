"""CSV files with a prompt in each row: read as lines of the format ``"openai"``.

The caller gives the names of the columns, since they differ. A quoted field may span several lines,
so the csv module finds the rows; one row at a time is held, of bounded size.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError, TraceError
from kvoffload.traces.lines import Lines

from .base import Format
from .openai import OpenAIParser

__all__ = ["COMMA_SEPARATED", "Rows"]

_NAMES = {"time": "time", "prompt": "prompt", "model": "model", "session": "session_id"}
MANY_NUMBERS = 10
_NUMBER = re.compile(r"\s*[-+\d.,]+\s*", re.ASCII)
_TOKENS = re.compile(r"\d{1,18}", re.ASCII)


class Rows:
    """An iterator over the rows of a CSV file, each as a line of JSON.

    TraceError if the first line does not name a column that is asked for.
    """

    def __init__(self, lines: Lines, columns: Mapping[str, str], max_row_bytes: int) -> None:
        self._lines = lines
        self._columns = columns
        self._texts = _Texts(lines, max_row_bytes)
        self._reader = csv.reader(self._texts)
        self._max_row_bytes = max_row_bytes
        self._positions: dict[str, int] | None = None  # by the contents of the columns
        self._width = 0
        self._numbers = 0  # rows so far whose prompt is a number
        self._has_text = False  # a row's prompt is not
        self._encode = require("msgspec", "reading a trace").json.encode

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> bytes:
        if self._positions is None:
            self._positions = self._header()
        try:
            row = self._row()
        except StopIteration:
            self._check_texts(at_end=True)
            raise
        if len(row) != self._width:
            raise BadLineError(f"a row must have {self._width} fields, got {len(row)}")
        cells = {role: row[position] for role, position in self._positions.items()}
        if not self._has_text:
            self._has_text = _NUMBER.fullmatch(cells["prompt"]) is None
            self._numbers += not self._has_text
            self._check_texts(at_end=False)
        given: dict[str, Any] = {
            name: cells[role]
            for role, name in _NAMES.items()
            if role == "prompt" or cells.get(role, "").strip()
        }
        output = cells.get("output", "").strip()
        if output:
            if not _TOKENS.fullmatch(output):
                raise BadLineError("output must be an integer >= 0, got another text")
            given["usage"] = {"completion_tokens": int(output)}
        line: bytes = self._encode(given)
        return line

    def _check_texts(self, *, at_end: bool) -> None:
        """Refuse a column of prompts in which all rows, or many, are numbers so far."""
        if not self._has_text and self._numbers >= (1 if at_end else MANY_NUMBERS):
            rule = (
                f"the column {describe(self._columns['prompt'])} must have the texts of prompts: "
                f"counts of tokens do not show what prompts share, got {self._numbers} numbers"
            )
            raise TraceError(self._lines.name, self._lines.count, rule)

    def _header(self) -> dict[str, int]:
        """Read the names of the columns and return the positions of those asked for."""
        try:
            names = self._row()
        except BadLineError as error:
            raise TraceError(self._lines.name, self._lines.count, str(error)) from None
        self._width = len(names)
        for column in self._columns.values():
            if column not in names:
                rule = f"the first line must name the column {describe(column)}"
                found = f"got {len(names)} others"
                raise TraceError(self._lines.name, self._lines.count, f"{rule}, {found}")
        return {role: names.index(column) for role, column in self._columns.items()}

    def _row(self) -> list[str]:
        """Return the next row that is not blank."""
        limit = csv.field_size_limit(self._max_row_bytes)  # of the whole process, for a moment
        try:
            while True:
                self._texts.size = 0
                row = next(self._reader)
                if row:
                    return row
        except csv.Error:
            raise BadLineError("must be a row of CSV, got another text") from None
        finally:
            csv.field_size_limit(limit)


class _Texts:
    """The lines of a file as text, as the csv module takes them."""

    def __init__(self, lines: Lines, max_row_bytes: int) -> None:
        self._lines = lines
        self._max_row_bytes = max_row_bytes
        self.size = 0  # of the row so far, bytes
        self._most = self._most_bytes()  # so far

    def __iter__(self) -> Iterator[str]:
        return self

    def _most_bytes(self) -> int:
        return min(self._max_row_bytes, self._lines.most_bytes)

    def __next__(self) -> str:
        line = self._lines.whole_line()
        if not line:
            raise StopIteration
        self.size += len(line)
        if self.size > self._most and self.size > (most := self._most_bytes()):
            raise BadLineError(f"a row must be at most {most} bytes long, got a longer one")
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise BadLineError("must be UTF-8, got other bytes") from None


COMMA_SEPARATED = Format(
    "csv", "CSV with a prompt in each row, and --columns", OpenAIParser, has_hashes=True
)
