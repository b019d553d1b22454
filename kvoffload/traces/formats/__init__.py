"""The formats of traces, one file per format, and the recognition of a line's format."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from kvoffload._printable import plural
from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError
from kvoffload.traces.objects import are_objects

from .bailian import BAILIAN
from .base import Format, kind_of, text_size
from .conversation import MOST_UNREAD
from .dynamo import DYNAMO, SCHEMA
from .gateways import ANY_LOG, LOGS, log_of, nearest
from .hexadecimal import HEXADECIMAL
from .json_text import decoded
from .lmcache import LMCACHE
from .logs import unknown
from .mooncake import MOONCAKE
from .mooncake_delta import MOONCAKE_DELTA
from .weka import WEKA

FORMATS: dict[str, Format] = {
    found.name: found
    for found in (MOONCAKE, LMCACHE, BAILIAN, HEXADECIMAL, WEKA, DYNAMO, MOONCAKE_DELTA)
}

LOG_FORMATS: dict[str, Format] = {log.name: log for log in reversed(LOGS.values())}
"""Logs of requests, which may be written when requests end, with Unix times."""


NO_SHARING = (
    "a trace must have the ids of blocks, or prompts: counts of tokens do not show what prompts "
    "share"
)
TAR_AT = 257  # where an archive of tar has its mark
MOST_NAME = 60  # characters of the name of a column
MOONCAKE_FIELDS = {"input_length", "output_length"}
_COUNT = re.compile(r"tokens?(?![a-z])|_length\b|token_?count", re.IGNORECASE)
_TEXT = re.compile(r"prompt|messages?|text|content|body|input|hash", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]{1,40}")  # of a field, as jq takes it
# Words of eight digits or more: a file of ordinary words is not taken for hashes.
_HASHES = re.compile(rb"(?:(?:0[xX])?[0-9a-fA-F]{8,}(?:[\s,]+|$))+")


def recognise(line: bytes, *, logs_only: bool = False) -> Format:
    """Return the format of a row; if none fits, Mooncake's, whose parser reports the error.

    `logs_only`: of logs of requests only. BadLineError if the row shows nothing that could be
    shared, or has fields of no known name.
    """
    if _HASHES.fullmatch(line) and not logs_only:
        return HEXADECIMAL
    row: Any = None
    with contextlib.suppress(BadLineError):
        row = decoded(line)
    if not isinstance(row, dict):
        advice = None if logs_only else _advice(line)
        if advice is not None:
            found = f"{len(line)} bytes that are none" if row is None else kind_of(row)
            raise BadLineError(f"must be a JSON object, got {found}; {advice}")
        return ANY_LOG if logs_only else MOONCAKE
    if not logs_only:
        if "chunk_hashes" in row:
            return LMCACHE
        if "requests" in row and "block_size" in row:
            return WEKA
        if row.get("schema") == SCHEMA:
            return DYNAMO
        if "hash_ids" in row:
            return BAILIAN if "chat_id" in row else MOONCAKE
    log = log_of(row)
    if log is not None or logs_only:
        return log or ANY_LOG
    counts = [name for name, value in row.items() if _COUNT.search(name) and _is_count(value)]
    has_lists = any(isinstance(value, list) and value for value in row.values())  # of token ids
    if counts and text_size(row) <= MOST_UNREAD and not has_lists:
        raise BadLineError(f"{NO_SHARING}, got {describe(counts)}")
    if not row or row.keys() & MOONCAKE_FIELDS:
        return MOONCAKE
    raise BadLineError(_page(row) or unknown(row, nearest(row)))


def _page(row: dict[str, Any]) -> str:
    """Return what is wrong with a row whose list has rows of a log, else an empty text."""
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and _NAME.fullmatch(name) and log_of(first) is not None:
            rule = f"must have one request, got a page of {plural(len(value), 'row')}"
            return f"{rule}: jq -c '.{name}[]' writes a line of each"
    return ""


def _is_count(value: object) -> bool:
    """Return whether a value is a number, or the text of one."""
    return type(value) in (int, float) or (isinstance(value, str) and value.isdecimal())


def _advice(line: bytes) -> str | None:
    """Return how to convert a file to one object per line; None if it is not known."""
    if line[TAR_AT:].startswith(b"ustar"):
        return "a tar archive: tar -xf unpacks it"
    if b"\0" in line:
        return "--format oracle-general reads libCacheSim's binary traces"
    if are_objects(line):
        return "--format objects reads time,object,size from standard input, too"
    if b"Received request" in line:
        return "a server's text log has no whole prompts; recording in the engine makes a trace"
    names = re.split(r"[,;\t]", line.decode("utf-8", "replace"))
    if len(names) > 1 and b"{" not in line and max(map(len, names)) <= MOST_NAME:
        counts = [name for name in names if _COUNT.search(name)]
        if counts and not any(_TEXT.search(name) for name in names if name not in counts):
            return f"{NO_SHARING}, got {describe(counts)}"
        return "--format csv reads a table, and --fields names its columns"
    return None
