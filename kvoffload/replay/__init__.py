"""Replay of request traces through a manager, with its results."""

from .counts import Counts
from .decoded import DecodedTrace
from .device import DeviceCache, device_hits
from .grid import Cell, GridWork, run_grid
from .offline import CEILINGS, belady, infinite_hits
from .protocol import Served, serve
from .results_file import ResultsFile
from .reuse import stack_distances
from .selection import Selection
from .simulate import simulate, simulate_in_parts, simulate_requests
from .statistics import DurationHistogram, ReplayResult
from .tiers import TierCounts, simulate_tiers
from .timed import replay

__all__ = [
    "CEILINGS",
    "Cell",
    "Counts",
    "DecodedTrace",
    "DeviceCache",
    "DurationHistogram",
    "GridWork",
    "ReplayResult",
    "ResultsFile",
    "Selection",
    "Served",
    "TierCounts",
    "belady",
    "device_hits",
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
