"""From a trace to a configuration: which policy, how much memory, and why."""

from .accelerators import Accelerator, accelerator, accelerator_names
from .advice import Advice, Cell, RecordedTrace, advise
from .details import Details, Disk, details
from .economy import Balance, Engine, balance, engine_of
from .fleets import FleetAdvice, advise_fleet
from .knee import Knee, find_knee
from .model_shape import ModelShape
from .models import model_names, model_shape
from .setup import FleetTier, Prices, Setup

__all__ = [
    "Accelerator",
    "Advice",
    "Balance",
    "Cell",
    "Details",
    "Disk",
    "Engine",
    "FleetAdvice",
    "FleetTier",
    "Knee",
    "ModelShape",
    "Prices",
    "RecordedTrace",
    "Setup",
    "accelerator",
    "accelerator_names",
    "advise",
    "advise_fleet",
    "balance",
    "details",
    "engine_of",
    "find_knee",
    "model_names",
    "model_shape",
]
