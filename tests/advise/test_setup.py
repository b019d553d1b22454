"""A question with a wrong value is refused, with the argument, the rule and the value."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.advise import Setup, advise
from kvoffload.advise.advice import RecordedTrace
from kvoffload.advise.economy import Engine
from kvoffload.advise.setup import FleetTier
from kvoffload.replay import DecodedTrace, GroupChunks
from kvoffload.traces import Workload

MIB = 2**20


def asked(**settings: Any) -> Setup:
    """Return a question about blocks of a mebibyte."""
    return Setup(**{"memory": 40 * MIB, "block_tokens": 512, "token_bytes": 2048} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 0}, "memory must be >= 1, got 0"),
        ({"block_tokens": 0}, "block_tokens must be >= 1, got 0"),
        ({"token_bytes": 0}, "token_bytes must be >= 1, got 0"),
        (
            {"token_bytes": 0, "engines": 2, "groups": GroupChunks.of_blocks(512)},
            "token_bytes must be >= 1, got 0",
        ),
        ({"device_memory": -1}, "device_memory must be >= 0, got -1"),
        ({"policies": ()}, r"policies must not be empty, got \(\)"),
        ({"policies": ("lru", "belady")}, "policy must be one of .*, got 'belady'"),
        ({"others": (-5,)}, "others must be >= 1, got -5"),
        ({"step_tokens": 0}, "step_tokens must be >= 1, got 0"),
        ({"engines": 257}, "engines must be <= 256, got 257"),
        ({"routers": ()}, r"routers must not be empty, got \(\)"),
        ({"routers": ("x",)}, "router must be one of .*, got 'x'"),
        ({"tiers": ()}, r"tiers must not be empty, got \(\)"),
        ({"tier_bandwidth": 0}, "tier_bandwidth must be >= 1, got 0"),
        ({"decode_ns": -1}, "decode_ns must be >= 0, got -1"),
        ({"slots": -1}, "slots must be >= 0, got -1"),
        ({"loop": "x"}, "loop must be one of open, closed, recorded, got 'x'"),
    ],
)
def test_values_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "a"}, "memory must be an integer, got 'a'"),
        ({"token_bytes": "a"}, "token_bytes must be an integer, got 'a'"),
        ({"full_blocks": 1}, "full_blocks must be True or False, got 1"),
        ({"policies": "lru"}, "policies must be a tuple, got 'lru'"),
        ({"policies": (5,)}, "policy must be a string, .*, got 5"),
        ({"others": 5}, "others must be a tuple, got 5"),
        ({"engine": 5}, "engine must be an Engine or None, got 5"),
        ({"groups": 5}, "groups must be GroupChunks or None, got 5"),
        ({"tiers": (5,)}, "tiers must be of FleetTier or None, got 5"),
        ({"prices": 5}, "prices must be Prices or None, got 5"),
    ],
)
def test_types_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        asked(**settings)


def test_many_large_blocks_may_need_more_bytes_than_63_bits_count() -> None:
    tiers = (FleetTier("shared", 2**65),)
    setup = asked(memory=2**64, device_memory=2**63, others=(2**66,), tiers=tiers)
    assert max(setup.memories()) == 2**66


def test_a_tier_checks_its_values() -> None:
    with pytest.raises(ValueError, match="kind must be one of shared, private, got 'own'"):
        FleetTier("own", MIB)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory must be >= 0, got -1"):
        FleetTier("shared", -1)
    with pytest.raises(ValueError, match=r"policy must be one of .*, got 'x'"):
        FleetTier("shared", MIB, "x")


def test_several_engines_are_advised_on_from_requests() -> None:
    workload = Workload(60, seed=3)
    engine = Engine(prefill_rate=9000, link_bandwidth=10**9)
    setup = asked(engines=2, routers=("session",), engine=engine)
    recorded = RecordedTrace.of(workload, arrivals=True)
    assert advise(workload, setup).rows == advise(recorded, setup).rows
    with pytest.raises(TypeError, match="requests must be Requests or a RecordedTrace, got Dec"):
        advise(DecodedTrace.of(workload), setup)  # type: ignore[arg-type]
