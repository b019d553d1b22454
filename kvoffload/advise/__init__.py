"""From a trace to a configuration: which policy, how much memory, and why."""

from .accelerators import accelerator
from .advice import Advice, RecordedTrace, advise
from .choice import Prices
from .details import Disk, details
from .economy import balance, engine_of
from .knee import find_knee
from .models import model_shape
from .setup import FleetTier, Setup

__all__ = [
    "Advice",
    "Disk",
    "FleetTier",
    "Prices",
    "RecordedTrace",
    "Setup",
    "accelerator",
    "advise",
    "balance",
    "details",
    "engine_of",
    "find_knee",
    "model_shape",
]
