"""Wrong arguments of replays are named, with the rule and the value, before any work."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload import CPUBackend, CPUOffloadingManager, LRUOffloadingManager
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    GroupChunks,
    Tier,
    replay,
    replay_all,
)
from kvoffload.traces import Request, Workload

TRACE = DecodedTrace.of([Request(1, 32, 1, (1, 2))])
ONE = Configuration(host=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "foo"}, "policy must be one of .*, got 'foo'"),
        ({"policy": "lru?foo=1"}, "policy: .*'foo'"),
        ({"host": -1}, "host must be >= 0, got -1"),
        ({"host": 2**31}, "host must be <= 2147483647, got 2147483648"),
        ({"device": -1}, "device must be >= 0, got -1"),
        ({"pending": -1}, "pending must be >= 0, got -1"),
        ({"rate": 0}, "rate must be >= 1, got 0"),
        ({"link": 0}, "link must be >= 1, got 0"),
        ({"tier_link": 0}, "tier_link must be >= 1, got 0"),
        ({"decode_ns": -1}, "decode_ns must be >= 0, got -1"),
        ({"loop": "Closed"}, "got 'Closed'; did you mean 'closed'?"),
        ({"slots": -1}, "slots must be >= 0, got -1"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_a_configuration_checks_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration(**{"host": 5} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": 5}, "policy must be a string, .*, got 5"),
        ({"rate": 9000.5}, "rate must be an integer, got 9000.5"),
        ({"link": True}, "link must be an integer, got True"),
        ({"loop": 5}, "loop must be a string, got 5"),
        ({"tier": 5}, "tier must be a Tier or None, got 5"),
        ({"groups": 5}, "groups must be GroupChunks, got 5"),
        ({"router": 5}, "router must be a string, got 5"),
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
    ],
)
def test_a_configuration_checks_types(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Configuration(**{"host": 5} | options)


def test_a_ceiling_may_have_more_slots_than_a_manager() -> None:
    found = replay(TRACE, Configuration(policy="belady", host=2**31))
    assert (found.hits, found.configuration.host) == (0, 2**31)


def test_a_tier_checks_its_values() -> None:
    with pytest.raises(ValueError, match="kind must be one of shared, private, got 'foo'"):
        Tier("foo", 5000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slots must be >= 0, got -1"):
        Tier("private", -1)
    with pytest.raises(ValueError, match=r"policy must be one of .*, got 'belady'"):
        Tier("private", 5, "belady")
    with pytest.raises(TypeError, match=r"policy must be a string, .*, got 5"):
        Tier("private", 5, 5)  # type: ignore[arg-type]


def test_blocks_have_no_negative_size() -> None:
    with pytest.raises(ValueError, match="block_bytes must be >= 0, got -1"):
        GroupChunks.of_blocks(512, block_bytes=-1)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"trace": 5}, TypeError, "trace must be requests, got 5"),
        ({"configuration": 5}, TypeError, "configuration must be a Configuration, got 5"),
        ({"manager": 3}, TypeError, "manager must be an OffloadingManager or None, got 3"),
        ({"parts": 0}, ValueError, "parts must be >= 1, got 0"),
        ({"parts": "a"}, TypeError, "parts must be an integer, got 'a'"),
        ({"progress": 5}, TypeError, "progress must be callable or None, got 5"),
    ],
)
def test_a_replay_checks_before_it_reads(options: Any, kind: Any, message: str) -> None:
    requests = iter(Workload(3))
    with pytest.raises(kind, match=message):
        replay(**{"trace": requests, "configuration": ONE} | options)
    assert len([*requests]) == 3


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"trace": Workload(3)}, TypeError, "trace must be a DecodedTrace, got <kvoffload"),
        ({"configurations": 3}, TypeError, "configurations must be .* of Configuration, got 3"),
        ({"configurations": [ONE, 3]}, TypeError, r"configurations\[1\] must be a Configuration"),
        ({"parts": 0}, ValueError, "parts must be >= 1, got 0"),
        ({"jobs": 0}, ValueError, "jobs must be >= 1, got 0"),
        ({"elsewhere": 5}, TypeError, "elsewhere must be Elsewhere or None, got 5"),
        ({"progress": 5}, TypeError, "progress must be callable or None, got 5"),
    ],
)
def test_many_replays_check_at_the_call(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        replay_all(**{"trace": TRACE, "configurations": [ONE]} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 5}, "requests must be an iterable of Request, got 5"),
        ({"progress": 5}, "progress must be callable or None, got 5"),
        ({"hints": "both"}, "hints must be HintOptions or None, got 'both'"),
        ({"arrivals": 1}, "arrivals must be True or False, got 1"),
    ],
)
def test_decoding_checks_before_it_reads(options: Any, message: str) -> None:
    requests = iter(Workload(3))
    with pytest.raises(TypeError, match=message):
        DecodedTrace.of(**{"requests": requests} | options)
    assert len([*requests]) == 3


@pytest.mark.parametrize(
    "manager",
    [
        CPUOffloadingManager(16, 500),
        CPUOffloadingManager(16, 4, "hit-density"),
        LRUOffloadingManager(CPUBackend(16, 500)),
    ],
)
def test_a_manager_has_the_blocks_of_the_configuration(manager: Any) -> None:
    with pytest.raises(ValueError, match="must be empty and have room for 5 blocks, as host says"):
        replay(TRACE, ONE, manager=manager)


@pytest.mark.parametrize("host", [5, 3])
def test_a_manager_is_empty(host: int) -> None:
    used = CPUOffloadingManager(16, 5)
    assert replay(TRACE, ONE, manager=used).stored == 2
    with pytest.raises(ValueError, match=r"must be empty and .*, got .* 2 of 5 blocks resident"):
        replay(TRACE, Configuration(host=host), manager=used)
