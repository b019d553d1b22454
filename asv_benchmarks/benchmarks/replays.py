"""Replays of 1,000 generated requests: time, and whether the hits stay the same."""

from __future__ import annotations

from typing import Any

from .common import POLICIES, new_manager, public

CAPACITY = 2_000
CAPACITIES = (250, 500, 1_000, 2_000, 4_000)


class Replay:
    """A replay through a manager that exists, one request at a time."""

    params = POLICIES
    param_names = ("policy",)
    repeat = 5

    def setup(self, policy: str) -> None:
        """Make the requests."""
        self.replay, workload = (
            public("kvoffload.replay", "replay"),
            public("kvoffload.traces", "Workload"),
        )
        self.requests = list(workload(1_000))

    def time_replay(self, policy: str) -> None:
        self.replay(self.requests, new_manager(policy, CAPACITY))


class Simulate:
    """A replay of a decoded trace, and its hits."""

    params = POLICIES
    param_names = ("policy",)
    repeat = 5

    def setup(self, policy: str) -> None:
        """Decode the requests."""
        decoded, device_hits, self.simulate = public(
            "kvoffload.replay", "DecodedTrace", "device_hits", "simulate"
        )
        self.trace = decoded.of(public("kvoffload.traces", "Workload")(1_000))
        self.keys, self.nothing = self.trace.keys(), device_hits(self.trace, 0)
        new_manager(policy, CAPACITY)

    def run(self, policy: str, capacity: int) -> Any:
        return self.simulate(self.trace, self.keys, policy, capacity, device_hits=self.nothing)

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
        self.trace = self.decoded.of(self.requests)

    def time_decode(self) -> None:
        self.decoded.of(self.requests)

    def time_device_hits(self) -> None:
        public("kvoffload.replay", "device_hits")(self.trace, 1_000)


class Fleet:
    """A replay of four engines behind a router."""

    params = ["round-robin", "prefix"]
    param_names = ("router",)
    repeat = 3

    def setup(self, router: str) -> None:
        """Decode the requests."""
        routers, create, self.replay = public(
            "kvoffload.replay.fleet", "ROUTERS", "Fleet", "replay_fleet"
        )
        if router not in routers:
            raise NotImplementedError(f"no router {router}")
        requests = public("kvoffload.traces", "Workload")(1_000)
        self.trace = public("kvoffload.replay", "DecodedTrace").of(requests, arrivals=True)
        self.keys = self.trace.keys()
        self.fleet = create(
            engines=4,
            router=router,
            host_blocks=CAPACITY // 4,
            rate=10_000,
            block_tokens=512,
            block_bytes=2**20,
        )

    def time_fleet(self, router: str) -> None:
        self.replay(self.trace, self.keys, self.fleet)
