"""The rows of a file as lines of JSON: lines themselves, objects of a list, and tables.

Each source is an iterator over rows with a `name` and a `count`, the number of the line or row
returned last; a bad row raises BadLineError, after which iteration goes on. One row at a time is
held, of bounded size.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload._extras import require
from kvoffload.errors import describe

from .errors import BadLineError, TraceError
from .formats.json_text import packed, unpacked
from .lines import STDIN, Lines, is_read_again
from .prompt_blocks import PromptOptions

if TYPE_CHECKING:
    from typing_extensions import Self

CSV, PARQUET = "csv", "parquet"
DELIMITERS = ",;\t|"
MANY_NUMBERS = 10
PROMPT_COLUMNS = re.compile(
    r"messages|prompt|input|(request_?)?body|request|(input_?)?text|content|hash_ids|query|"
    r"conversations?|proxy_server_request",
    re.IGNORECASE,
)
"""Names of columns that a table of prompts may have."""
FREE_BYTES, BYTES_PER_BYTE = 2**24, 64  # of the rows of a Parquet file, in all and per byte of it
BATCH_ROWS = 64  # of a Parquet file, decoded at a time
_NAME = re.compile(r"[^\W\d][\w .()/-]{0,39}")  # of a column, written for people perhaps
_NUMBER = re.compile(r"\s*[-+\d.,]+\s*", re.ASCII)
_STRUCTURE = re.compile(rb'["{}\[\]]')
_BETWEEN = re.compile(rb"(?:\xef\xbb\xbf)?[\s,\[\]]*")
_IN_TEXT = re.compile(rb'["\\]')
_PIECE = 2**16


@contextlib.contextmanager
def open_rows(
    path: str, format: str | None, options: PromptOptions, max_row_bytes: int
) -> Iterator[Rows]:
    """Provide the rows of a file, whose kind is `format` or is recognised by its beginning."""
    if format == PARQUET or (format != CSV and is_read_again(path) and _is_parquet(path)):
        yield ParquetRows(path, max_row_bytes)
        return
    with Lines(path, max_row_bytes) as lines:
        start = lines.ahead().lstrip()
        first = start.partition(b"\n")[0]
        if format == CSV or (format is None and _is_table(first, path, options)):
            yield TableRows(lines, options)
        elif start.startswith(b"[") or re.match(rb"\{\s*\n", start):
            yield JSONObjects(lines)
        else:
            yield lines


def _is_parquet(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(4) == b"PAR1"
    except (OSError, ValueError):
        return False  # the reader reports what is wrong with it


def _is_table(line: bytes, path: str, options: PromptOptions) -> bool:
    """Return whether the first line of a file has the names of columns."""
    text = line.decode("utf-8", "replace").lstrip("\ufeff")
    if "{" in text or "[" in text or '":' in text:
        return False
    names = _cells(text, options.delimiter or delimiter_of(text))
    if len(names) < 2 and options.fields is None:
        return False
    known = set((options.fields or {}).values())
    if {".csv", ".tsv"}.intersection(Path(path).suffixes) or known & {*names}:
        return True
    return any(PROMPT_COLUMNS.fullmatch(name) for name in names)


def delimiter_of(header: str) -> str:
    """Return what separates the names in a header: what occurs most often."""
    return max(DELIMITERS, key=header.count)


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


class _OfLines:
    """Rows that are made of the lines of a file."""

    is_recording = False

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.name = lines.name

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that have been read."""
        return self._lines.bytes_read

    def __iter__(self) -> Self:
        return self


class JSONObjects(_OfLines):
    """The objects of a list, or objects that follow each other over several lines.

    TraceError at what is no object or too long: where the next one begins is not known.
    """

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self.is_recording = lines.is_recording
        self.count = 1
        self._data = b""
        self._at = 0  # where the next object may begin
        self._ended = self._is_open = False

    def __next__(self) -> bytes:
        if not self._begin():
            raise StopIteration
        depth, is_text, at = 0, False, self._at
        while True:
            match = (_IN_TEXT if is_text else _STRUCTURE).search(self._data, at)
            if match is None:
                at = max(at, len(self._data)) - self._at  # `\\` at the end escapes what comes
                if at > self._lines.most_bytes:
                    rule = f"an object must be at most {self._lines.most_bytes} bytes long"
                    raise TraceError(self.name, self.count, f"{rule}, got a longer one")
                if not self._more():
                    self._ended = True
                    raise BadLineError("must be a JSON object, got one that is cut off")
                continue
            found, at = match[0], match.end()
            if found == b"\\":
                at += 1
            elif found == b'"':
                is_text = not is_text
            else:
                depth += 1 if found in b"{[" else -1
                if depth <= 0:
                    row = self._data[self._at : at]
                    self._pass_to(at)
                    return row

    def _begin(self) -> bool:
        """Go to the beginning of the next object; False if there is none."""
        while not self._ended:
            match = _BETWEEN.match(self._data, self._at)
            if match is not None:
                self._is_open = (self._is_open or b"[" in match[0]) and b"]" not in match[0]
                self._pass_to(match.end())
            if self._at < len(self._data):
                if self._data[self._at : self._at + 1] == b"{":
                    return True
                rule = "must be a list of JSON objects, got something else in it"
                raise TraceError(self.name, self.count, rule)
            self._ended = not self._more()
            if self._ended and self._is_open:
                raise BadLineError("must be a list of JSON objects, got one that is cut off")
        return False

    def _pass_to(self, at: int) -> None:
        self.count += self._data.count(b"\n", self._at, at)
        self._at = at

    def _more(self) -> bool:
        """Read more, and drop what has been passed; False at the end."""
        piece = self._lines.read_bytes(_PIECE)
        self._data = self._data[self._at :] + piece
        self._at = 0
        return bool(piece)


class TableRows(_OfLines):
    """The rows of a table of text, each as a line of JSON whose fields are the columns.

    A quoted field may span several lines, so the csv module finds the rows. TraceError if the first
    line lacks a column that is named, or the prompts are counts.
    """

    def __init__(self, lines: Lines, options: PromptOptions) -> None:
        super().__init__(lines)
        self._named = options.fields or {}
        self._texts = _Texts(lines)
        self._numbers = 0  # rows so far whose prompt is a number
        self._has_text = "prompt" not in self._named  # a row's prompt is not
        self._names: list[str] | None = None
        self._delimiter = options.delimiter
        self._reader: Any = None

    @property
    def count(self) -> int:
        """Number of the line that was read last."""
        return self._lines.count

    def __next__(self) -> bytes:
        if self._names is None:
            self._names = self._header()
        try:
            cells = self._row()
        except StopIteration:
            self._check_texts(at_end=True)
            raise
        if len(cells) != len(self._names):
            raise BadLineError(f"a row must have {len(self._names)} fields, got {len(cells)}")
        row: dict[str, Any] = dict(zip(self._names, cells, strict=True))
        if not self._has_text:
            cell = row.get(self._named["prompt"], "")  # without one, a path leads into another
            self._has_text = _NUMBER.fullmatch(cell) is None
            self._numbers += not self._has_text
            self._check_texts(at_end=False)
        if "hash_ids" in row:
            if not row["hash_ids"].lstrip().startswith("["):  # ids with blanks between them
                row["hash_ids"] = f"[{','.join(row['hash_ids'].split())}]"
            row = {name: self._value(cell) for name, cell in row.items()}
        return packed(row).encode()

    @staticmethod
    def _value(cell: str) -> Any:
        """Return the number or the list of a cell of a table of ids, else its text."""
        text = cell.strip()
        if text and text[0] not in "[{-0123456789":
            return text
        return unpacked(text) if text else None

    def _check_texts(self, *, at_end: bool) -> None:
        """Refuse a column of prompts in which all rows, or many, are numbers so far."""
        if not self._has_text and self._numbers >= (1 if at_end else MANY_NUMBERS):
            rule = (
                f"the column {describe(self._named['prompt'])} must have the texts of prompts: "
                f"counts of tokens do not show what prompts share, got {self._numbers} numbers"
            )
            raise TraceError(self.name, self.count, rule)

    def _header(self) -> list[str]:
        """Read the names of the columns."""
        try:
            first = next(self._texts).rstrip("\r\n")
            delimiter = self._delimiter or delimiter_of(first)
            self._reader = csv.reader(self._texts, delimiter=delimiter)
            names = _cells(first, delimiter)
            if not self._named:
                named = [name for name in names if name]  # an index may have no name
                if not named or not all(map(_NAME.fullmatch, named)):  # prompts would be shown
                    rule = "the first line must have the names of columns"
                    raise BadLineError(f"{rule}, got {len(names)} cells that are none")
            plain = [*map(_plain_name, names)]
            wanted = {path.partition(".")[0] for path in self._named.values()}
            wanted |= {*self._named.values()}
            pairs = zip(names, plain, strict=True)
            # a column may be named as in the file or, as messages name it, as logs write it
            names = [
                two if not wanted or {one, two} & wanted == {two} else one for one, two in pairs
            ]
        except BadLineError as error:
            raise TraceError(self.name, self.count, str(error)) from None
        counts = Counter(names)
        for column in self._named.values() or filter(None, counts):
            count = counts[column] or counts[column.partition(".")[0]]
            rule = f"the first line must name the column {describe(column)}"
            if not count:
                raise TraceError(self.name, self.count, f"{rule}, got {len(names)} others")
            if count > 1:
                raise TraceError(self.name, self.count, f"{rule} once, got it {count} times")
        return names

    def _row(self) -> list[str]:
        """Return the next row that is not blank."""
        # Of the whole process, for a moment; `_Texts` bounds a row.
        limit = csv.field_size_limit(2**31 - 1)
        try:
            while True:
                self._texts.size = 0
                row: list[str] = next(self._reader)
                if self._texts.has_ended:  # the module asks for more only within quotes
                    raise BadLineError("a row must end in the file, got a quoted field that is cut")
                if row:
                    return row
        except csv.Error:
            raise BadLineError("must be a row of a table, got another text") from None
        finally:
            csv.field_size_limit(limit)


def _plain_name(name: str) -> str:
    """Return the name of a column as logs write it, if it is written for people."""
    is_written = " " in name or name[:1].isupper()
    return re.sub(r"\s+", "_", name.strip()).lower() if is_written else name


class _Texts:
    """The lines of a file as text, as the csv module takes them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.size = 0  # of the row so far, bytes
        self.has_ended = False
        self._most = lines.most_bytes  # so far

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._lines.whole_line()
        if not line:
            self.has_ended = True
            raise StopIteration
        self.size += len(line)
        if self.size > self._most and self.size > (most := self._lines.most_bytes):
            raise BadLineError(f"a row must be at most {most} bytes long, got a longer one")
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise BadLineError("must be UTF-8, got other bytes") from None


class ParquetRows:
    """The rows of a Parquet file, each as a line of JSON whose fields are the columns.

    A small file may unpack to very much: what its metadata states and what its rows have is bounded
    by its size.
    """

    def __init__(self, path: str, max_row_bytes: int) -> None:
        if path == STDIN:
            raise TraceError("<stdin>", None, "Parquet must be a file, got standard input")
        require("pyarrow", "reading Parquet", "parquet")
        parquet: Any = importlib.import_module("pyarrow.parquet")
        json = require("msgspec", "reading a trace").json
        self._encode = json.Encoder(enc_hook=str).encode  # of pandas, if that is installed
        self.name, self.is_recording, self.count = path, False, 0
        self._max_row_bytes = max_row_bytes
        try:
            self.bytes_read = os.stat(path).st_size  # noqa: PTH116 - as the reader does
            self._most = FREE_BYTES + BYTES_PER_BYTE * self.bytes_read
            file = parquet.ParquetFile(path, pre_buffer=False)
            stated = sum(
                file.metadata.row_group(index).total_byte_size
                for index in range(file.metadata.num_row_groups)
            )
            if stated > self._most:
                raise TraceError(path, None, f"{self._rule}, got {stated}")
            self._rows = self._decoded(file)
        except TraceError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises many
            raise self._fault(error) from None
        self._made = 0

    @property
    def _rule(self) -> str:
        return f"a Parquet file of {self.bytes_read} bytes must unpack to at most {self._most}"

    def __iter__(self) -> ParquetRows:
        return self

    def __next__(self) -> bytes:
        row = next(self._rows)
        self.count += 1
        line: bytes = self._encode(row)
        self._made += len(line)
        if self._made > self._most:
            raise TraceError(self.name, self.count, f"{self._rule}, got more")
        if len(line) > self._max_row_bytes:
            raise BadLineError(f"a row must be at most {self._max_row_bytes} bytes long")
        return line

    def _decoded(self, file: Any) -> Iterator[Mapping[str, Any]]:
        arrow: Any = importlib.import_module("pyarrow")
        try:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                table = arrow.Table.from_batches([batch])
                for index, column in enumerate(batch.schema):
                    if arrow.types.is_timestamp(column.type):  # Python has no nanoseconds
                        micro = arrow.timestamp("us", column.type.tz)
                        times = table.column(index).cast(micro, safe=False)
                        table = table.set_column(index, column.name, times)
                yield from table.to_pylist()
        except Exception as error:  # noqa: BLE001 - the library raises many
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> TraceError:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
        rule = f"must be a readable Parquet file: {why or type(error).__name__}"
        return TraceError(self.name, self.count or None, rule)


Rows = Lines | JSONObjects | TableRows | ParquetRows
"""An iterator over rows, each as a line of JSON or of a format's own."""
