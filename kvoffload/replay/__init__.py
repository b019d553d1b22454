"""Replay of request traces through a manager, with its results."""

from typing import Any

from kvoffload._former import former_names

from . import grid as _grid
from . import groups as _groups
from . import offline as _offline
from . import results as _results
from . import results_file as _results_file
from . import serving as _serving
from . import simulate as _simulate
from .arrivals import Arrivals
from .closed_loop import ClosedLoop, replay_closed
from .device import DeviceCache, device_hits, device_hits_and_junctions
from .groups import Group, GroupChunks, GroupLayout
from .hints import HintOptions, Told, TraceHints
from .offline import stack_distances
from .requests import DecodedTrace, Selection
from .results import LoopTimes, ReplayResult
from .simulate import replay, simulate
from .tiers import TierCounts, simulate_tiers

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "DecodedTrace",
    "DeviceCache",
    "Group",
    "GroupChunks",
    "GroupLayout",
    "HintOptions",
    "LoopTimes",
    "ReplayResult",
    "Selection",
    "TierCounts",
    "Told",
    "TraceHints",
    "device_hits",
    "device_hits_and_junctions",
    "replay",
    "replay_closed",
    "simulate",
    "simulate_tiers",
    "stack_distances",
]


def _replay_groups(requests: Any, manager: Any, chunks: GroupChunks, **options: Any) -> Any:
    return replay(requests, manager, groups=chunks, **options)


_INSIDE = {
    _grid: ("Cell", "GridWork", "run_grid"),
    _groups: ("GroupKind", "Retention", "Runs"),
    _offline: ("CEILINGS",),
    _results: ("DurationHistogram",),
    _results_file: ("ResultsFile",),
    _serving: ("GroupServed", "GroupServer", "Served", "group_key", "serve"),
    _simulate: ("simulate_in_parts", "simulate_requests"),
}
__getattr__ = former_names(
    __name__,
    {
        name: (getattr(module, name), f"it is a part of the inside, {module.__name__}")
        for module, names in _INSIDE.items()
        for name in names
    }
    | {
        "Counts": (ReplayResult, "it is ReplayResult"),
        "Place": (_groups.ChunkIndex, "it is a part of the inside, kvoffload.replay.groups"),
        "belady": (_offline.belady, 'simulate takes "belady" as a policy'),
        "infinite_hits": (_offline.infinite_hits, 'simulate takes "infinite" as a policy'),
        "replay_groups": (_replay_groups, "replay takes groups"),
    },
)
