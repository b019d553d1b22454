"""Requests through a manager, and what came of it."""

from .driver import replay
from .selection import Selection
from .statistics import DurationHistogram, ReplayResult

__all__ = ["DurationHistogram", "ReplayResult", "Selection", "replay"]
