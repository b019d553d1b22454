"""Policies of the literature, as baselines: in plain Python, to compare with and to start from.

In the root of a clone each is a policy of every command, such as
``kvoffload sweep trace.jsonl --policy lru,examples.policies:GDSF``.
"""

from .clock import CLOCK
from .fifo import FIFO
from .gdsf import GDSF
from .lru_k import LRUK
from .random_choice import Random
from .two_q import TwoQ
from .w_tinylfu import WTinyLFU

__all__ = ["CLOCK", "FIFO", "GDSF", "LRUK", "Random", "TwoQ", "WTinyLFU"]
