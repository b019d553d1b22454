"""The formats of traces, one file per format, and the recognition of a line's format."""

from __future__ import annotations

import re
import shlex

from kvoffload.errors import describe
from kvoffload.traces.errors import BadLineError

from .bailian import BAILIAN
from .base import Format, Parser, json_object
from .comma_separated import COMMA_SEPARATED
from .dynamo import DYNAMO, SCHEMA
from .hexadecimal import HEXADECIMAL
from .lmcache import LMCACHE
from .mooncake import MOONCAKE
from .mooncake_delta import MOONCAKE_DELTA
from .openai import OPENAI, request_of
from .weka import WEKA

__all__ = [
    "FORMATS",
    "MODEL_FORMATS",
    "PROMPT_FORMATS",
    "Format",
    "Parser",
    "recognise",
]

FORMATS: dict[str, Format] = {
    found.name: found
    for found in (MOONCAKE, LMCACHE, BAILIAN, HEXADECIMAL, WEKA, DYNAMO, MOONCAKE_DELTA)
}

PROMPT_FORMATS: dict[str, Format] = {found.name: found for found in (OPENAI, COMMA_SEPARATED)}
"""Formats that hold prompts instead of ids; they are read only if they are named."""

MODEL_FORMATS = (LMCACHE.name,)
"""Formats whose lines name the model that was asked."""

NO_SHARING = (
    "a trace must have the ids of blocks, or prompts: counts of tokens do not show what prompts "
    "share"
)
_COUNT = re.compile(r"tokens?(?![a-z])|_length\b|token_?count", re.IGNORECASE)
_TEXT = re.compile(r"prompt|messages?|text|content|body|input|hash", re.IGNORECASE)
# Words of eight digits or more: a file of ordinary words is not taken for hashes.
_HASHES = re.compile(rb"(?:(?:0[xX])?[0-9a-fA-F]{8,}(?:[\s,]+|$))+")


def recognise(line: bytes, path: str = "LOG") -> Format:
    """Return the format of a line; if none fits, Mooncake's, whose parser reports the error.

    BadLineError if it looks like another format, with advice on how to convert it, in a command
    that names the file as `path`.
    """
    if _HASHES.fullmatch(line):
        return HEXADECIMAL
    try:
        row = json_object(line)
    except BadLineError as error:
        advice = _advice(line)
        if advice is not None:
            raise BadLineError(f"{error}; {advice}") from None
        return MOONCAKE
    if "chunk_hashes" in row:
        return LMCACHE
    if "requests" in row and "block_size" in row:
        return WEKA
    if row.get("schema") == SCHEMA:
        return DYNAMO
    if "hash_ids" not in row and request_of(row) is not None:
        command = f"kvoffload convert --format {OPENAI.name} {shlex.quote(path)}"
        rule = "must have the ids of blocks, got a request with its prompt"
        raise BadLineError(f"{rule}: {command} --output trace.jsonl.zst makes a trace of it")
    counts = [name for name, value in row.items() if _COUNT.search(name) and _is_number(value)]
    if counts and "hash_ids" not in row:
        raise BadLineError(f"{NO_SHARING}, got {describe(counts)}")
    return BAILIAN if "chat_id" in row else MOONCAKE


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _advice(line: bytes) -> str | None:
    """Return how to convert a file to one object per line; None if it is not known."""
    if line.startswith(b"["):
        return "jq -c '.[]' writes the objects of a list as lines"
    if line == b"{":
        return "jq -c . writes each object as one line"
    if b"\0" in line:
        return "--format oracle-general reads libCacheSim's binary traces"
    if b"," in line and b"{" not in line:
        names = line.decode("utf-8", "replace").split(",")
        counts = [name for name in names if _COUNT.search(name)]
        if counts and not any(_TEXT.search(name) for name in names if name not in counts):
            return f"{NO_SHARING}, got {describe(counts)}"
        return (
            "for CSV, write each row as an object of timestamp, input_length, output_length and "
            "hash_ids; kvoffload convert --format csv reads prompts"
        )
    return None
