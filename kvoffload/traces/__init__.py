"""Request traces: read, made up, recorded, written, looked over."""

from __future__ import annotations

from kvoffload._extras import MissingExtraError

from .errors import TraceError
from .reader import Trace
from .recorder import TraceRecorder
from .request import Request
from .survey import Survey
from .workload import Workload
from .writer import write_requests, write_trace

__all__ = [
    "MissingExtraError",
    "Request",
    "Survey",
    "Trace",
    "TraceError",
    "TraceRecorder",
    "Workload",
    "write_requests",
    "write_trace",
]
