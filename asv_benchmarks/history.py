"""Print a table of releases from the kept results, without measuring.

Microseconds per call of 128 blocks, and bytes per block, LRU and ARC. Usage::

    python asv_benchmarks/history.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RELEASES = {
    "9f17d9d5": "0.1",
    "edeb814e": "0.2",
    "a46dca1b": "0.3",
    "55f26b34": "0.4",
    "b265465c": "0.5",
}
"""Commits of the releases; the last one is the newest that was measured."""
ROWS = {
    "lookup": "calls.Full.time_lookup",
    "store into free slots": "calls.StoreFree.time_store",
    "store that evicts": "calls.StoreEvicting.time_store",
    "store, 50,000 blocks pinned": "calls.StoreBesidePinned.time_store",
    "request that hits": "calls.Full.time_request_hit",
    "request that misses": "calls.StoreEvicting.time_request_miss",
    "bytes per block": "memory.Memory.track_bytes_per_block",
}
POLICIES = ("lru", "arc")


def kept() -> dict[str, dict[str, Any]]:
    """Return the results of each commit that was measured, by its first eight digits."""
    files = (path for path in RESULTS.glob("*/*.json") if path.name != "machine.json")
    return {path.name[:8]: json.loads(path.read_text(encoding="utf-8")) for path in files}


def value(results: dict[str, Any], name: str, policy: str) -> float | None:
    """Return a figure in microseconds or bytes, or None if the commit has none."""
    figures, params = results["results"].get(name, (None, [[]]))[:2]
    if not figures:
        return None
    figure = figures[params[0].index(repr(policy))]
    if figure is None or figure != figure:  # asv writes n/a as NaN
        return None
    return float(figure) * (1e6 if ".time_" in name else 1)


def rounded(figure: float) -> str:
    """Return a figure with two digits, or more if it is large."""
    return f"{figure:,.0f}" if figure >= 10 else f"{figure:.2g}"


def cell(results: dict[str, Any], name: str) -> str:
    """Return the figures of both policies."""
    figures = [value(results, name, policy) for policy in POLICIES]
    return "; ".join("n/a" if each is None else rounded(each) for each in figures)


def main() -> None:
    """Print the table."""
    results = kept()
    columns = [results[commit] for commit in RELEASES]
    print("| LRU; ARC |", " | ".join(RELEASES.values()), "|")
    print("|---|" + "---|" * len(columns))
    for row, name in ROWS.items():
        print(f"| {row} |", " | ".join(cell(each, name) for each in columns), "|")


if __name__ == "__main__":
    main()
