"""Replay of request traces through a manager, with its results."""

from typing import Any

from kvoffload._former import former_names

from .device import DeviceCache, device_hits, device_hits_and_junctions
from .grid import Cell, run_grid
from .grid import GridWork as _GridWork
from .groups import (
    STEP_TOKENS,
    Group,
    GroupChunks,
    GroupKind,
    GroupLayout,
    Retention,
)
from .groups import Place as _Place
from .groups import Runs as _Runs
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
    "Group",
    "GroupChunks",
    "GroupKind",
    "GroupLayout",
    "GroupServed",
    "GroupServer",
    "ReplayResult",
    "ResultsFile",
    "Retention",
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


def _replay_groups(requests: Any, manager: Any, chunks: GroupChunks, **options: Any) -> Any:
    return replay(requests, manager, groups=chunks, **options)


_INSIDE = "it is a part of the inside"
__getattr__ = former_names(
    __name__,
    {
        "Counts": (ReplayResult, "it is ReplayResult"),
        "GridWork": (_GridWork, f"{_INSIDE}, kvoffload.replay.grid"),
        "Place": (_Place, f"{_INSIDE}, kvoffload.replay.groups"),
        "Runs": (_Runs, f"{_INSIDE}, kvoffload.replay.groups"),
        "replay_groups": (_replay_groups, "replay takes groups"),
    },
)
