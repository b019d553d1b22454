"""Requests through a manager, and what came of it."""

from .decoded import DecodedTrace
from .device import device_hits
from .driver import replay
from .offline import belady, infinite_hits
from .selection import Selection
from .simulate import CEILINGS, Counts, simulate, simulate_in_parts
from .statistics import DurationHistogram, ReplayResult

__all__ = [
    "CEILINGS",
    "Counts",
    "DecodedTrace",
    "DurationHistogram",
    "ReplayResult",
    "Selection",
    "belady",
    "device_hits",
    "infinite_hits",
    "replay",
    "simulate",
    "simulate_in_parts",
]
