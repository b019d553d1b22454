"""Replays of 1,000 generated requests: time, and whether the hits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .common import POLICIES, new_manager, new_replay, public

CAPACITY = 2_000
CAPACITIES = (250, 500, 1_000, 2_000, 4_000)


class Replay:
    """A replay through a manager that exists, one request at a time."""

    params = POLICIES
    param_names = ("policy",)
    repeat = 5

    def setup(self, policy: str) -> None:
        """Make the requests."""
        self.replay = new_replay(policy, CAPACITY)
        self.requests = list(public("kvoffload.traces", "Workload")(1_000))

    def time_replay(self, policy: str) -> None:
        self.replay(self.requests)


def replays_of(trace: Any) -> Callable[[str, int], Any]:
    """Return the replay of a decoded trace by policy and capacity, whose keys exist."""
    try:
        replays, create = (
            public("kvoffload.replay.loop", "Replays")(trace),
            public("kvoffload.replay", "Configuration"),
        )
    except NotImplementedError:  # until 0.4
        device_hits, simulate = public("kvoffload.replay", "device_hits", "simulate")
        keys, nothing = trace.keys(), device_hits(trace, 0)
        return lambda policy, capacity: simulate(trace, keys, policy, capacity, device_hits=nothing)
    replays.keys()
    return lambda policy, capacity: replays.of(create(policy=policy, host=capacity))


class Simulate:
    """A replay of a decoded trace, and its hits."""

    params = POLICIES
    param_names = ("policy",)
    repeat = 5

    def setup(self, policy: str) -> None:
        """Decode the requests."""
        decoded = public("kvoffload.replay", "DecodedTrace")
        trace = decoded.of(public("kvoffload.traces", "Workload")(1_000))
        self.run = replays_of(trace)
        new_manager(policy, CAPACITY)

    def time_simulate(self, policy: str) -> None:
        self.run(policy, CAPACITY)

    def time_sweep(self, policy: str) -> None:
        for capacity in CAPACITIES:
            self.run(policy, capacity)

    def track_hits(self, policy: str) -> int:
        counts = self.run(policy, CAPACITY)
        for name in ("hit_blocks", "hits"):
            if hasattr(counts, name):
                return int(getattr(counts, name))
        raise NotImplementedError("no count of hits")


Simulate.track_hits.unit = "blocks"  # type: ignore[attr-defined]


class Decode:
    """A trace in memory: decoding it, the hits of an accelerator's cache, its reuse distances."""

    repeat = 5

    def setup(self) -> None:
        """Make the requests."""
        self.decoded = public("kvoffload.replay", "DecodedTrace")
        self.requests = list(public("kvoffload.traces", "Workload")(1_000))
        trace = self.decoded.of(self.requests)
        try:
            device_hits, given = public("kvoffload.replay", "device_hits"), (trace, 1_000)
        except NotImplementedError:  # since 0.5
            device_hits = public("kvoffload.replay.device", "device_hits")
            groups = public("kvoffload.replay", "GroupChunks").of_blocks()
            rows = public("kvoffload.replay.rows", "Rows")(trace, groups, trace.keys)
            given = (rows, 1_000)
        self.find = lambda: device_hits(*given)

    def time_decode(self) -> None:
        self.decoded.of(self.requests)

    def time_device_hits(self) -> None:
        self.find()


class Fleet:
    """A replay of four engines behind a router."""

    params = ["round-robin", "prefix"]
    param_names = ("router",)
    repeat = 3

    def setup(self, router: str) -> None:
        """Decode the requests."""
        requests = public("kvoffload.traces", "Workload")(1_000)
        trace = public("kvoffload.replay", "DecodedTrace").of(requests, arrivals=True)
        common = {"engines": 4, "router": router, "rate": 10_000}
        try:
            replays = public("kvoffload.replay.loop", "Replays")(trace)
            create, groups = public("kvoffload.replay", "Configuration", "GroupChunks")
        except NotImplementedError:  # until 0.4
            self.replay = self.replay_of_fleet(trace, common)
            return
        blocks = groups.of_blocks(512, block_bytes=2**20)
        fleet = create(**common, host=CAPACITY // 4, groups=blocks)
        replays.keys()
        self.replay = lambda: replays.of(fleet)

    def replay_of_fleet(self, trace: Any, common: dict[str, Any]) -> Callable[[], object]:
        """Return the replay of 0.4."""
        routers, create, replay = public(
            "kvoffload.replay.fleet", "ROUTERS", "Fleet", "replay_fleet"
        )
        if common["router"] not in routers:
            raise NotImplementedError(f"no router {common['router']}")
        fleet = create(**common, host_blocks=CAPACITY // 4, block_tokens=512, block_bytes=2**20)
        keys = trace.keys()
        return lambda: replay(trace, keys, fleet)

    def time_fleet(self, router: str) -> None:
        self.replay()
