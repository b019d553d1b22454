"""Live shadow simulation: hit ratios at other sizes, causes of misses, wasted stores.

A `Watch` is passed to a manager and observes it: the hit ratio at other sizes and under other
policies, with error bars; causes of misses; blocks stored in vain; transfers that never ended.
It changes no decision.
"""

from ._watch import Watch
from .estimate import Point
from .hints import HeardHints
from .overdue import Overdue
from .report import Explanation, WatchReport

__all__ = ["Explanation", "HeardHints", "Overdue", "Point", "Watch", "WatchReport"]
