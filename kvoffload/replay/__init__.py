"""Replay of request traces through configurations, with their results."""

from .configuration import Configuration, Tier
from .grid import replay_all
from .groups import Group, GroupChunks, GroupLayout
from .hints import HintOptions
from .loop import replay
from .requests import DecodedTrace, Selection
from .results import Result

__all__ = [
    "Configuration",
    "DecodedTrace",
    "Group",
    "GroupChunks",
    "GroupLayout",
    "HintOptions",
    "Result",
    "Selection",
    "Tier",
    "replay",
    "replay_all",
]
