"""Request traces: readers, recorder, generator, writers and survey."""

from __future__ import annotations

from .errors import TraceError
from .merged import MergedTrace
from .prompt_blocks import PromptOptions
from .prompts import write_prompts
from .reader import Trace
from .recorder import TraceRecorder
from .request import Request
from .sessions import SessionOptions
from .survey import Survey
from .workload import Workload
from .writer import write_requests, write_trace

__all__ = [
    "MergedTrace",
    "PromptOptions",
    "Request",
    "SessionOptions",
    "Survey",
    "Trace",
    "TraceError",
    "TraceRecorder",
    "Workload",
    "write_prompts",
    "write_requests",
    "write_trace",
]
