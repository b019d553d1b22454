"""Make a trace of the agent sessions that LMCache publishes, whose requests are texts.

The source is the repository LMCache/lmcache-agent-trace (Apache-2.0, commit 16a14ad): a file per
session, a JSON object per line with `input`, `output` and `timestamp`, microseconds. Of its folders
`magagent` and `miniswe` are read. A block is 64 characters of a prompt, and four characters count
as a token; prompts without a whole block are left out. Times within a session are real. The start
of each session is drawn over ten minutes, because the sessions were recorded apart.
Usage::

    git clone https://github.com/LMCache/lmcache-agent-trace
    python examples/traces/lmcache_agents.py lmcache-agent-trace lmcache_agents_64c.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvoffload.traces import Request, write_trace

FOLDERS = ("magagent", "miniswe")
BLOCK_CHARACTERS = 64
CHARACTERS_PER_TOKEN = 4
STARTS_MS = 600_000
SEED = 5
NAME_CHARACTERS = 30  # of a file's name, its last ones, that name the session


def sessions(source: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name of each session and its lines in the order of time."""
    paths = sorted(path for folder in FOLDERS for path in (source / folder).glob("*.jsonl"))
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            rows = sorted(map(json.loads, lines), key=lambda row: row["timestamp"])
        yield path.name[-NAME_CHARACTERS:], rows


def arrivals(source: Path) -> list[tuple[int, str, dict[str, Any]]]:
    """Return time, milliseconds, session and line of each request, in the order of time."""
    draw = random.Random(SEED)
    found = []
    for session, rows in sessions(source):
        start = draw.uniform(0, STARTS_MS)
        for row in rows:
            after = (row["timestamp"] - rows[0]["timestamp"]) / 1000
            if len(row["input"]) >= BLOCK_CHARACTERS:
                found.append((int(start + after), session, row))
    return sorted(found, key=lambda arrival: arrival[0])


def requests(source: Path) -> Iterator[Request]:
    """Yield the requests; a block is numbered when its text first follows all text before it."""
    numbers: dict[tuple[int, str], int] = {}
    for timestamp, session, row in arrivals(source):
        text = row["input"]
        hash_ids: list[int] = []
        for end in range(BLOCK_CHARACTERS, len(text) + 1, BLOCK_CHARACTERS):
            before = hash_ids[-1] if hash_ids else -1
            block = before, text[end - BLOCK_CHARACTERS : end]
            hash_ids.append(numbers.setdefault(block, len(numbers)))
        yield Request(
            timestamp,
            len(text) // CHARACTERS_PER_TOKEN,
            len(row["output"]) // CHARACTERS_PER_TOKEN,
            tuple(hash_ids),
            session,
        )


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="a clone of LMCache/lmcache-agent-trace")
    parser.add_argument("output", type=Path, help="the trace, .gz or .zst to compress it")
    chosen = parser.parse_args()
    written = write_trace(requests(chosen.source), chosen.output)
    if not written:
        chosen.output.unlink()
        parser.error(f"source must hold {' and '.join(FOLDERS)}, got {str(chosen.source)!r}")
    print(f"{written:,} requests")


if __name__ == "__main__":
    main()
