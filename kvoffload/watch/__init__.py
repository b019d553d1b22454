"""See, live, whether offloading pays and what to change.

A `Watch` is passed to a manager and looks on: the hit ratio at other sizes and under other
policies, with an error bar; why blocks were missed; what was stored for nothing; transfers that
never ended. It changes no decision.
"""

from ._watch import Explanation, Watch, WatchReport
from .estimate import Point
from .overdue import Overdue

__all__ = ["Explanation", "Overdue", "Point", "Watch", "WatchReport"]
