"""Request traces: readers, recorder, generator, writers and survey."""

from __future__ import annotations

from kvoffload._extras import MissingExtraError

from .errors import TraceError
from .merged import MergedTrace, trace_files
from .prompts import write_prompts
from .reader import Trace
from .recorder import TraceRecorder
from .request import Request
from .survey import Survey
from .workload import Workload
from .writer import write_requests, write_trace

__all__ = [
    "MergedTrace",
    "MissingExtraError",
    "Request",
    "Survey",
    "Trace",
    "TraceError",
    "TraceRecorder",
    "Workload",
    "trace_files",
    "write_prompts",
    "write_requests",
    "write_trace",
]
