"""Replay of request traces through a manager, with its results."""

from .counts import Counts
from .decoded import DecodedTrace
from .device import DeviceCache, device_hits
from .grid import Cell, GridWork, run_grid
from .group_replay import GroupDevice, GroupServed, GroupServer, group_device_tokens, group_key
from .groups import Group, GroupChunks, GroupKind, GroupLayout, Place, Retention, Runs
from .offline import CEILINGS, belady, infinite_hits
from .protocol import Served, serve
from .results_file import ResultsFile
from .reuse import stack_distances
from .selection import Selection
from .simulate import simulate, simulate_in_parts, simulate_requests
from .statistics import DurationHistogram, ReplayResult
from .steps import STEP_TOKENS, StepServed, StepServer
from .tiers import TierCounts, simulate_tiers
from .timed import replay, replay_groups

__all__ = [
    "CEILINGS",
    "STEP_TOKENS",
    "Cell",
    "Counts",
    "DecodedTrace",
    "DeviceCache",
    "DurationHistogram",
    "GridWork",
    "Group",
    "GroupChunks",
    "GroupDevice",
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
    "StepServed",
    "StepServer",
    "TierCounts",
    "belady",
    "device_hits",
    "group_device_tokens",
    "group_key",
    "infinite_hits",
    "replay",
    "replay_groups",
    "run_grid",
    "serve",
    "simulate",
    "simulate_in_parts",
    "simulate_requests",
    "simulate_tiers",
    "stack_distances",
]
