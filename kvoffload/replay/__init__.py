"""Replay of request traces through a manager, with its results."""

import warnings
from typing import Any

from .device import DeviceCache, device_hits, device_hits_and_junctions
from .grid import Cell, GridWork, run_grid
from .groups import (
    STEP_TOKENS,
    Group,
    GroupChunks,
    GroupKind,
    GroupLayout,
    Place,
    Retention,
    Runs,
)
from .offline import CEILINGS, belady, infinite_hits, stack_distances
from .requests import DecodedTrace, Selection
from .results import DurationHistogram, ReplayResult
from .results_file import ResultsFile
from .serving import GroupServed, GroupServer, Served, group_key, serve
from .simulate import replay, simulate, simulate_in_parts, simulate_requests
from .tiers import TierCounts, simulate_tiers

__all__ = [
    "CEILINGS",
    "STEP_TOKENS",
    "Cell",
    "DecodedTrace",
    "DeviceCache",
    "DurationHistogram",
    "GridWork",
    "Group",
    "GroupChunks",
    "GroupKind",
    "GroupLayout",
    "GroupServed",
    "GroupServer",
    "Place",
    "ReplayResult",
    "ResultsFile",
    "Retention",
    "Runs",
    "Selection",
    "Served",
    "TierCounts",
    "belady",
    "device_hits",
    "device_hits_and_junctions",
    "group_key",
    "infinite_hits",
    "replay",
    "run_grid",
    "serve",
    "simulate",
    "simulate_in_parts",
    "simulate_requests",
    "simulate_tiers",
    "stack_distances",
]


def __getattr__(name: str) -> Any:
    """Return what an earlier name stands for."""
    earlier = {"Counts": ReplayResult, "replay_groups": _replay_groups}
    if name not in earlier:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now = "ReplayResult" if name == "Counts" else "replay, which takes groups"
    text = f"kvoffload.replay.{name} is called {now}; the name goes in 0.5"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return earlier[name]


def _replay_groups(requests: Any, manager: Any, chunks: GroupChunks, **options: Any) -> Any:
    return replay(requests, manager, groups=chunks, **options)
