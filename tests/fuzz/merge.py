"""Bytes as two to four trace files that are read as one, merged by time.

The first byte chooses how many files, the second whether bad lines are passed over. Then each file
is a byte that chooses how it is compressed, two bytes with its length, and its bytes; the last has
what is left. What a merge must give is computed from the files read one by one: their ids as they
are where they are one numbering, and elsewhere as many different ones as the files have in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import compress, pairwise
from pathlib import Path

from kvoffload.traces import MergedTrace, Request, Survey, Trace

from .reading import MAX_LINE_BYTES, PACKINGS, read
from .scratch import scratch


def files_of(data: bytes) -> Iterator[bytes]:
    """Yield the content of each file that the bytes stand for."""
    count = 2 + (data[0] % 3 if data else 0)
    data = data[2:]
    for number in range(count):
        packing, size = data[:1], int.from_bytes(data[1:3], "little")
        data = data[3:]
        if number == count - 1:
            size = len(data)
        content, data = data[:size], data[size:]
        yield PACKINGS[packing[0] % len(PACKINGS)](content) if packing else b""


def merged(traces: list[tuple[list[Request], float | None]]) -> list[Request]:
    """Merge requests as the contract says: the earliest that comes next in its file, of the first.

    Each of `traces` has the requests of a file and the second since 1970 when its time 0 was.
    """
    starts = [start for _, start in traces if start is not None]
    waiting = []
    for requests, start in traces:
        later = 0 if start is None else round((start - min(starts)) * 1000)
        waiting.append([replace(each, timestamp=each.timestamp + later) for each in requests])
    found = []
    while any(waiting):
        least = min(requests[0].timestamp for requests in waiting if requests)
        first = next(each for each in waiting if each and each[0].timestamp == least)
        found.append(first.pop(0))
    return found


def run_merge(data: bytes) -> int:
    """Read the files that the bytes stand for as one; return how many requests they hold."""
    skip_bad = bool(data[1:2] and data[1] % 2)
    with scratch() as folder:
        paths = []
        for number, content in enumerate(files_of(data)):
            paths.append(str(Path(folder, f"{number}.jsonl")))
            Path(paths[-1]).write_bytes(content)
        together = MergedTrace(
            paths, skip_bad=skip_bad, max_line_bytes=MAX_LINE_BYTES, same_ids=True
        )
        found, fault = read(together)
        traces = [Trace(p, skip_bad=skip_bad, max_line_bytes=MAX_LINE_BYTES) for p in paths]
        alone = [read(trace) for trace in traces]
        # A file without a request is left out, unless all are.
        are_empty = [trace.is_empty for trace in traces]
        kept = [all(are_empty) or not is_empty for is_empty in are_empty]
        faults = [message for _, message in compress(alone, kept) if message is not None]
        expected = merged(
            [(each, trace.start) for (each, _), trace in zip(alone, traces, strict=True)]
        )
        if found != expected[: len(found)]:
            raise AssertionError(f"merged {found}, not {expected}")
        if all(in_order(requests) for requests, _ in alone) and not in_order(found):
            raise AssertionError(f"not in order of time: {found}")
        if fault is not None:
            if fault not in faults:
                raise AssertionError(f"no file alone has the fault {fault!r}, but {faults}")
            return len(found)
        if faults or len(found) < len(expected):
            raise AssertionError(f"{len(found)} of {len(expected)} requests, no fault of {faults}")
        check_apart(paths, skip_bad, traces, [requests for requests, _ in alone])
        if together.bad_lines != sum(trace.bad_lines for trace in traces):
            raise AssertionError(f"{together.bad_lines} bad lines")
        Survey.of(found, block_tokens=16)
        again, _ = read(together)
        if again != found:
            raise AssertionError(f"read again: {again}, not {found}")
    return len(found)


def check_apart(
    paths: list[str], skip_bad: bool, traces: list[Trace], files: list[list[Request]]
) -> None:
    """Raise unless ids that are no hashes are kept apart per file, and those that are shared."""
    apart, _ = read(MergedTrace(paths, skip_bad=skip_bad, max_line_bytes=MAX_LINE_BYTES))
    expected = {
        (-1 if trace.has_hashes else number, hash_id)
        for number, (trace, requests) in enumerate(zip(traces, files, strict=True))
        for request in requests
        for hash_id in request.hash_ids
    }
    found = {hash_id for request in apart for hash_id in request.hash_ids}
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} ids kept apart, not {len(expected)}")


def in_order(requests: list[Request]) -> bool:
    """Return whether no request comes before the one that it follows."""
    return all(one.timestamp <= other.timestamp for one, other in pairwise(requests))
