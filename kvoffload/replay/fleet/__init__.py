"""Fleets in simulated time: engines behind a router, with shared or private tiers."""

from kvoffload.replay.arrivals import Arrivals, NoSessionsError

from .counts import EngineCounts, FleetResult
from .fleet import Fleet, Tier, replay_fleet
from .routers import ROUTERS, RouterSpec, parse_router

__all__ = [
    "ROUTERS",
    "Arrivals",
    "EngineCounts",
    "Fleet",
    "FleetResult",
    "NoSessionsError",
    "RouterSpec",
    "Tier",
    "parse_router",
    "replay_fleet",
]
