"""Bytes as a trace file: read whole, passing over bad lines, and back after writing what was read.

The first byte chooses the format, the second the compression that the rest is put into; the rest
may be compressed itself, whole or damaged. What was read is surveyed and decoded as the commands
do it.
"""

from __future__ import annotations

import gzip
import math
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvoffload._extras import require
from kvoffload.advise.advice import part_seconds
from kvoffload.errors import MissingExtraError
from kvoffload.replay import DecodedTrace
from kvoffload.traces import MergedTrace, Request, Survey, Trace, TraceError, write_trace
from kvoffload.traces.formats import FORMATS
from kvoffload.traces.formats.base import MAX_NAME_BYTES
from kvoffload.traces.lines import zstd_module
from kvoffload.traces.oracle_general import ORACLE_GENERAL

MAX_LINE_BYTES = 400
CHOICES: list[str | None] = [None, *FORMATS, ORACLE_GENERAL]


def zstd(data: bytes) -> bytes:
    """Compress with zstandard."""
    compressed: bytes = require(zstd_module(), "fuzzing zstandard traces").compress(data)
    return compressed


PACKINGS: tuple[Callable[[bytes], bytes], ...] = (
    bytes,
    lambda data: gzip.compress(data, mtime=0),
    zstd,
)


def check_request(request: Request) -> None:
    """Raise unless a request keeps what its class says."""
    times = type(request.timestamp) in (int, float) and 0 <= request.timestamp < 2**63
    lengths = all(
        type(tokens) is int and 0 <= tokens < 2**63
        for tokens in (request.input_length, request.output_length)
    )
    ids = type(request.hash_ids) is tuple and all(
        type(hash_id) is int and 0 <= hash_id < 2**64 for hash_id in request.hash_ids
    )
    names = [name for name in (request.session, request.parent, request.stop) if name is not None]
    session = all(type(name) is str for name in names)
    if session and any(len(name.encode()) > MAX_NAME_BYTES for name in names):
        raise AssertionError(f"names without a bound: {names}")
    if not (times and lengths and ids and session):
        raise AssertionError(f"no valid request: {request!r}")


def read(trace: MergedTrace | Trace) -> tuple[list[Request], str | None]:
    """Return the requests up to the end or the first error, and its message."""
    found: list[Request] = []
    try:
        for request in trace:
            check_request(request)
            found.append(request)
        if not all(remark.isprintable() and len(remark) < 300 for remark in trace.remarks):
            raise AssertionError(f"no remarks of one line: {trace.remarks!r}")
    except TraceError as error:
        message = str(error)
        if not message.isprintable() or len(error.rule) > 300:
            raise AssertionError(f"no message for one line: {message!r}") from error
        return found, message
    except MissingExtraError:  # `nox -s fuzz` leaves pyarrow out, whose bytes are not ours to fuzz
        return found, "Parquet"
    return found, None


def read_skipping(path: Path, **options: Any) -> list[Request]:
    """Return the requests without bad lines; raise if skipping those changes good ones."""
    strict, fault = read(Trace(path, **options))
    lenient, _ = read(Trace(path, skip_bad=True, **options))
    if lenient[: len(strict)] != strict or (fault is None and lenient != strict):
        raise AssertionError(f"skipping bad lines changes good ones: {strict} {lenient}")
    return lenient


def check_figures(requests: list[Request]) -> None:
    """Raise unless what the commands compute of requests is finite and can be shown."""
    survey = Survey.of(requests, block_tokens=16)
    times = array("d", [request.timestamp for request in requests])
    figures = [survey.seconds, survey.ideal_hit_ratio or 0.0, *part_seconds(times)]
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
        raise AssertionError(f"no finite figures: {figures}")
    for size in (1, 16, survey.block_tokens or 1):
        contradiction = survey.contradiction(size)
        if contradiction is not None and not contradiction.isprintable():
            raise AssertionError(f"no message for one line: {contradiction!r}")
    if DecodedTrace.of(requests).unique_blocks != survey.unique_blocks:
        raise AssertionError(f"{survey.unique_blocks} unique blocks are not those decoded")


def run_reading(data: bytes) -> int:
    """Read the file that the bytes stand for; return how many requests it holds."""
    head, body = data[:2].ljust(2, b"\0"), data[2:]
    format = CHOICES[head[0] % len(CHOICES)]
    with tempfile.TemporaryDirectory() as folder:
        path, copy = Path(folder, "trace"), Path(folder, "copy")
        path.write_bytes(PACKINGS[head[1] % len(PACKINGS)](body))
        options: dict[str, Any] = {"format": format, "max_line_bytes": MAX_LINE_BYTES}
        lenient = read_skipping(path, **options)
        if lenient:
            check_figures(lenient)
            write_trace(lenient, copy)
            again = list(Trace(copy, format="mooncake"))
            if again != lenient:
                raise AssertionError(f"written and read again: {lenient} {again}")
    return len(lenient)
