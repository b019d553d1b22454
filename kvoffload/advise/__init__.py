"""From a trace to a configuration: which policy, how much memory, and why."""

from .accelerators import accelerator
from .advice import Advice, RecordedTrace, advise
from .details import Disk, details
from .economy import balance, engine_of
from .fleets import FleetAdvice, advise_fleet
from .knee import find_knee
from .models import model_shape
from .setup import FleetTier, Prices, Setup

__all__ = [
    "Advice",
    "Disk",
    "FleetAdvice",
    "FleetTier",
    "Prices",
    "RecordedTrace",
    "Setup",
    "accelerator",
    "advise",
    "advise_fleet",
    "balance",
    "details",
    "engine_of",
    "find_knee",
    "model_shape",
]
