"""Request traces: readers, recorder, generator, writers and survey."""

from __future__ import annotations

from kvoffload._extras import MissingExtraError

from .errors import TraceError
from .merged import MergedTrace
from .oracle_general import write_oracle_general
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
    "MissingExtraError",
    "PromptOptions",
    "Request",
    "SessionOptions",
    "Survey",
    "Trace",
    "TraceError",
    "TraceRecorder",
    "Workload",
    "write_oracle_general",
    "write_prompts",
    "write_requests",
    "write_trace",
]
