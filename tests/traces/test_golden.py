"""What is read of a file, to the letter: ``golden.txt``.

A case has a title behind ``#``, the options of its files as JSON behind ``$``, and files: the lines
of each, and below them, indented, what is read, and what else is read if bad lines are skipped. In
a line, ``«x*300»`` stands for three hundred times x, with escapes as in Python's bytes; ``«-»``
ends a file whose last line has no end. Files without such signs are read in gzip, too. Blocks of
prompts are numbered within a case. ``python -m tests.traces.test_golden`` writes the file anew,
from its cases.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvoffload.traces import PromptOptions, Request, SessionOptions, Trace, TraceError
from tests.traces.samples import GOLDEN

CASES = re.findall(r"^# (.*)\n((?:(?!# ).*\n)*)", GOLDEN, re.MULTILINE)
NAMED = [one.name for one in fields(Request) if one.default in (None, False)]


def data_of(line: str) -> bytes:
    """Return the bytes that a line of a file stands for."""
    found = b""
    for place, text in enumerate(re.split("«(.*?)»", line.removesuffix("«-»"))):
        data = text.encode()
        if place % 2:
            data, _, times = data.rpartition(b"*")
            data = data.decode("unicode_escape").encode("latin-1") * int(times)
        found += data
    return found + b"\n" * (not line.endswith("«-»"))


def ranges(numbers: list[int]) -> str:
    """Return numbers in brackets, as ranges of those that follow each other."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    texts = (f"{part[0]}-{part[-1]}" if part[1:] else str(part[0]) for part in parts)
    return f"[{','.join(texts)}]"


def reading(trace: Trace, numbers: dict[int, int]) -> list[str]:
    """Return what is read of a trace, what it says of itself, and its error."""
    found, error = [], []
    try:
        for one in trace:
            ids = list(one.hash_ids)
            if trace.has_prompts:
                ids = [numbers.setdefault(block, len(numbers)) for block in ids]
            more = {name: getattr(one, name) for name in NAMED}
            more = {name: value for name, value in more.items() if value not in (None, False)}
            row = [one.timestamp, f"{one.input_length}+{one.output_length}", ranges(ids)]
            found.append(" ".join(map(str, [*row, *(f"{k}={v}" for k, v in more.items())])))
    except TraceError as raised:
        rule = re.sub(r"object \(.*?\), got", "object (…), got", raised.rule)  # as msgspec says it
        error = [f"! {raised.line or ''}: {rule}"]
    said = {"tokens": trace.block_tokens, "bytes": trace.block_bytes, "start": trace.start}
    said |= {"hashes": trace.has_hashes or None, "bad": trace.bad_lines or None}
    head = [f"{name}={value}" for name, value in said.items() if value is not None]
    remarks = [f"; {one}" for one in trace.remarks]
    return [" ".join([str(trace.format), *head]), *found, *remarks, *error]


def printed(body: str) -> str:
    """Return what the file has for a case."""
    options: dict[str, Any] = {}
    numbers: dict[int, int] = {}
    text = ""
    for part in re.findall(r"^\$ .*\n|^(?:(?!\$ |  ).*\n)+", body, re.MULTILINE):
        text += part
        if part.startswith("$ "):
            options = json.loads(part[2:])
            continue
        given = {"name": "trace", **options}
        prompts = PromptOptions(**{"salt": "s", **given.pop("prompts", {})})
        sessions = SessionOptions(**given.pop("sessions", {}))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, given.pop("name"))
            data = b"".join(map(data_of, part.splitlines()))
            trace = Trace(path, prompts=prompts, sessions=sessions, **given)
            path.write_bytes(data)
            plain = reading(trace, numbers)
            if "«" not in part:  # else a small file that unpacks to much may be refused
                path.write_bytes(gzip.compress(data))
                assert reading(trace, numbers) == plain
            path.write_bytes(data)
            trace.skip_bad = True
            skipping = reading(trace, numbers)
        if plain[-1].startswith("! : "):  # an error of the whole file, which is no bad line
            assert skipping == plain
        if skipping != plain and any(one[0].isdigit() for one in skipping):
            plain += [f"skipping: {skipping[0]}", *skipping[1:]]
        text += "".join(f"  {one}\n" for one in plain)
    return text


@pytest.mark.parametrize(("title", "body"), CASES, ids=[title for title, _ in CASES])
def test_what_is_read(title: str, body: str) -> None:
    assert printed(body) == body, title


if __name__ == "__main__":
    text = "".join(f"# {title}\n{printed(body)}" for title, body in CASES)
    Path(__file__).with_name("golden.txt").write_text(text, encoding="utf-8")
