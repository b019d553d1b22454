"""Requests through a manager, and what came of it."""

from .decoded import DecodedTrace
from .device import DeviceCache, device_hits
from .driver import replay
from .grid import Cell, GridWork, run_grid
from .offline import CEILINGS, belady, infinite_hits
from .protocol import Served, serve
from .results import ResultsFile
from .selection import Selection
from .simulate import Counts, simulate, simulate_in_parts
from .statistics import DurationHistogram, ReplayResult

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
    "belady",
    "device_hits",
    "infinite_hits",
    "replay",
    "run_grid",
    "serve",
    "simulate",
    "simulate_in_parts",
]
