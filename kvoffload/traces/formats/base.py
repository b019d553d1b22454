"""The interface of trace formats, and checks that they share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvoffload._extras import require
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.request import MAX_HASH_ID, MAX_TOKENS, Request

MAX_NAME_BYTES = 256
MAX_SECONDS = 2**53 // 1000  # times and waits that are made of them are valid in milliseconds


class Parser:
    """A parser of the lines of one pass over one trace."""

    block_tokens: int | None = None  # if the lines so far state it and agree
    block_bytes: int | None = None  # likewise
    start: float | None = None  # Unix time of time 0, seconds, if the lines state it
    model_name: str | None = None  # whose requests are wanted, None for all; set by the creator

    def __call__(self, line: bytes) -> Request:
        """Parse a line of one request, stripped, not blank; BadLineError if it breaks a rule."""
        raise NotImplementedError

    def requests(self, line: bytes) -> Sequence[Request]:
        """Return the requests of a line that are wanted; BadLineError if it breaks a rule."""
        return (self(line),)

    @property
    def remarks(self) -> list[str]:
        """Contents of the lines so far that cannot be followed, in words, with their counts."""
        return []

    @property
    def nothing_text(self) -> str:
        """Contents of the lines so far instead of requests, in words, or an empty text."""
        return ""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of trace.

    Ids of formats that `has_hashes` are hashes of the blocks' content, so that equal ids mean equal
    blocks in several files too. Ids that number the blocks of a file are valid only in that file.
    """

    name: str  # for ``--format``
    new_parser: Callable[[], Parser] = Parser  # for one pass over one trace, without options
    has_hashes: bool = False


def json_object(line: bytes) -> dict[str, Any]:
    """Decode a line that must hold one JSON object, else BadLineError."""
    msgspec = require("msgspec", "reading a trace")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        found = f"got {len(line)} bytes that are none"  # which may be text of a prompt
        raise BadLineError(f"must be a JSON object ({error}), {found}") from None
    if not isinstance(row, dict):
        raise BadLineError(f"must be a JSON object, got {kind_of(row)}")
    return row


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words, without the value."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null or nothing"}
    return names[type(value)]


def text_size(value: object) -> int:
    """Return the characters of the longest text in a value; those in a list count together."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(text_size, value))
    if isinstance(value, dict):
        return max(map(text_size, value.values()), default=0)
    return 0


def field(row: dict[str, Any], name: str) -> object:
    """Return a field that must be there."""
    if name not in row:
        raise BadLineError(f"must have the field {name}, got only {describe(sorted(row))}")
    return row[name]


def integer(value: object, name: str, *, least: int = 0, largest: int = MAX_TOKENS) -> int:
    """Return a value that must be an integer from `least` to `largest`."""
    if type(value) is not int or not least <= value <= largest:
        too_large = type(value) is int and value > largest
        rule = f"<= {largest}" if too_large else f">= {least}"
        raise BadLineError(f"{name} must be an integer {rule}, got {describe(value)}")
    return value


def number(value: object, name: str, largest: int) -> int | float:
    """Return a value that must be a number from 0 to `largest`."""
    if (type(value) is not int and type(value) is not float) or not 0 <= value <= largest:
        too_large = type(value) in (int, float) and value > largest  # type: ignore[operator]
        rule = f"<= {largest}" if too_large else ">= 0"
        raise BadLineError(f"{name} must be a number {rule}, got {describe(value)}")
    return value


def bounded_name(name: str) -> str:
    """Return a name of a session, a model or the like: itself, or 32 digits for a long one.

    A row repeats the names of others, so a name without a bound would multiply the input. A name
    that is no Unicode text is replaced too.
    """
    if len(name) <= MAX_NAME_BYTES and name.isascii():
        return name
    data = name.encode("utf-8", "surrogatepass")
    if len(data) <= MAX_NAME_BYTES and data.decode("utf-8", "ignore") == name:
        return name
    return blake2b(data, digest_size=16).hexdigest()


def text(value: object, name: str) -> str:
    """Return a name that must be a string, of bounded length."""
    if type(value) is not str:
        raise BadLineError(f"{name} must be a string, got {describe(value)}")
    return bounded_name(value)


class Agreed:
    """A value that lines state, such as the tokens of a block."""

    def __init__(self) -> None:
        self._stated: set[int | None] = set()  # two at most: more are not needed

    def with_one(self, value: int | None) -> int | None:
        """Add the value of a line; return it if all lines so far agree, else None."""
        if len(self._stated) < 2:
            self._stated.add(value)
        return value if len(self._stated) == 1 else None


def integer_ids(row: dict[str, Any], name: str = "hash_ids") -> tuple[int, ...]:
    """Return a field that must be a list of integers in [0, 2**64)."""
    ids = field(row, name)
    if not isinstance(ids, list):
        raise BadLineError(f"{name} must be a list of integers, got {describe(ids)}")
    if not are_integers(ids) or min(ids, default=0) < 0 or max(ids, default=0) > MAX_HASH_ID:
        for position, hash_id in enumerate(ids):
            integer(hash_id, f"{name}[{position}]", largest=MAX_HASH_ID)
    return tuple(ids)


def are_integers(values: list[Any]) -> bool:
    """Return whether all values are integers, and none a bool."""
    return {int}.issuperset(map(type, values))


def hexadecimal_id(text: str, name: str, namespace: bytes = b"") -> int:
    """Return the id of a block hash that is written in hexadecimal, with or without ``0x``.

    The id is 63 bits of a digest of the hash and its namespace, so that it needs no memory, is the
    same in every file and fits a signed integer; among n blocks two share an id with a chance of
    about n² / 2⁶⁴.
    """
    digits = text.lower().removeprefix("-").removeprefix("0x")
    if not _HEXADECIMAL.fullmatch(digits):
        raise BadLineError(f"{name} must be a hexadecimal number, got {describe(text)}")
    if text.startswith("-"):  # a signed 64-bit hash, as Python's hex() writes it
        digits = "-" + digits
    digest = blake2b(digits.encode() + b"\0" + namespace, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


_HEXADECIMAL = re.compile("[0-9a-f]+")


class HexadecimalIds(dict[str, int]):
    """The ids of block hashes in one namespace; recent ones are remembered, as prompts repeat."""

    REMEMBERED, MOST_CHARACTERS = 2**15, 80

    def __init__(self, namespace: bytes = b"") -> None:
        super().__init__()
        self._namespace = namespace

    def __missing__(self, text: str) -> int:
        hash_id = hexadecimal_id(text, "hash", self._namespace)
        if len(self) >= self.REMEMBERED:
            self.clear()
        if len(text) <= self.MOST_CHARACTERS:
            self[text] = hash_id
        return hash_id

    def of(self, texts: list[str], name: str) -> tuple[int, ...]:
        """Return the ids of hashes; `name`, such as ``"hash {}"``, is that of one at a position."""
        try:
            return tuple(map(self.__getitem__, texts))
        except BadLineError:
            return tuple(
                hexadecimal_id(text, name.format(position), self._namespace)
                for position, text in enumerate(texts)
            )
