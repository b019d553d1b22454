"""Replay of request traces through configurations, with their results."""

from .arrivals import Arrivals, NoSessionsError
from .configuration import Configuration, Tier
from .grid import replay_all
from .groups import Group, GroupChunks, GroupLayout
from .hints import HintOptions, Told, TraceHints
from .loop import replay
from .offline import stack_distances
from .requests import DecodedTrace, Selection
from .results import Result
from .routers import RouterSpec, parse_router

__all__ = [
    "Arrivals",
    "Configuration",
    "DecodedTrace",
    "Group",
    "GroupChunks",
    "GroupLayout",
    "HintOptions",
    "NoSessionsError",
    "Result",
    "RouterSpec",
    "Selection",
    "Tier",
    "Told",
    "TraceHints",
    "parse_router",
    "replay",
    "replay_all",
    "stack_distances",
]
