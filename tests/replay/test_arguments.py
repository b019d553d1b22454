"""Wrong arguments of replays are named, with the rule and the value, before any work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvoffload import CPUBackend, CPUOffloadingManager, LRUOffloadingManager
from kvoffload.replay import (
    Configuration,
    DecodedTrace,
    Group,
    GroupChunks,
    GroupLayout,
    HintOptions,
    Tier,
    replay,
    replay_all,
)
from kvoffload.replay.serving import GroupServer
from kvoffload.traces import Request, Workload

TRACE = DecodedTrace.of([Request(1, 32, 1, (1, 2))])
ONE = Configuration(host=5)
BLOCKS = GroupChunks.of_blocks(16)
SEVERAL = GroupChunks.of(GroupLayout((Group("full", 1, 16), Group("state", 1, 16)), 4096), 16)
ALONE = GroupLayout((Group("full", 1, 16),), 4096)
STEPS = GroupChunks.of_blocks(16, step_tokens=64)
LRU = LRUOffloadingManager(CPUBackend(16, 4))
ROOM = "must be empty and have room for 5 blocks, as host says"

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "foo"}, ValueError, "policy must be one of .*, got 'foo'"),
    ({"policy": "lru?foo=1"}, ValueError, "policy: .*'foo'"),
    *(
        ({name: -1}, ValueError, f"{name} must be >= 0, got -1")
        for name in ("host", "device", "pending", "decode_ns", "slots", "seed")
    ),
    ({"host": 2**31}, ValueError, "host must be <= 2147483647, got 2147483648"),
    ({"rate": 0}, ValueError, "rate must be >= 1, got 0"),
    ({"link": 0}, ValueError, "link must be >= 1, got 0"),
    ({"tier_link": 0}, ValueError, "tier_link must be >= 1, got 0"),
    ({"loop": "Closed"}, ValueError, "got 'Closed'; did you mean 'closed'?"),
    ({"policy": 5}, TypeError, "policy must be a string, .*, got 5"),
    ({"rate": 9000.5}, TypeError, "rate must be an integer, got 9000.5"),
    ({"link": True}, TypeError, "link must be an integer, got True"),
    ({"loop": 5}, TypeError, "loop must be a string, got 5"),
    ({"tier": 5}, TypeError, "tier must be a Tier or None, got 5"),
    ({"groups": 5}, TypeError, "groups must be GroupChunks, got 5"),
    ({"router": 5}, TypeError, "router must be a string, got 5"),
    ({"seed": "a"}, TypeError, "seed must be an integer, got 'a'"),
    *(
        ({"engines": 2, **options}, ValueError, said)
        for options, said in (
            ({"engines": 0}, "engines must be >= 1, got 0"),
            ({"engines": 257}, "engines must be <= 256, got 257"),
            ({"router": "round"}, "router must be one of round-robin, random, .*, got 'round'"),
            ({"router": "sticky?block=2"}, "router: sticky takes the options blocks, got 'block'"),
            ({"router": "random?a=2"}, "router: random takes the options none, got 'a'"),
            ({"router": "sticky?blocks"}, "router options must read option=value, got 'blocks'"),
            ({"router": "sticky?blocks=2&blocks=3"}, "option 'blocks' must be given once"),
            ({"router": "sticky?blocks=0"}, "blocks must be in 1 ... "),
            ({"router": "events?host=nan"}, "host must be in 0.0 ... 100.0, got 'nan'"),
            ({"router": "events?sees=disk"}, "sees must be one of device, host, tier, got 'disk'"),
            ({"router": "events?sees=tier"}, "must have a tier to see, got none"),
            ({"router": "events?lag_ms=5"}, "must have a rate for its lag, got none"),
            ({"policy": "infinite", "tier": Tier("shared", 4)}, "not be a ceiling with a tier"),
            ({"rate": 5}, "groups must know the tokens of a block with a rate"),
            ({"policy": "belady"}, "must not be 'belady' with time or several engines"),
            ({"pending": 2}, "pending must be 0 with time or several engines, got 2"),
            (
                {"engines": 1, "rate": 5, "pending": 2, "groups": BLOCKS},
                "pending must be 0 with time or several",
            ),
            ({"engines": 1, "loop": "recorded", "pending": 2}, "0 with a closed loop, got 2"),
            ({"groups": GroupChunks.of_blocks(16, step_tokens=16)}, "must have no steps with"),
            ({"groups": SEVERAL}, "groups must be one with time or several engines, got several"),
        )
    ),
]

CALLS: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda _: Tier("foo", 5000), ValueError, "kind must be one of shared, private, got 'foo'"),  # type: ignore[arg-type]
    (lambda _: Tier("private", -1), ValueError, "slots must be >= 0, got -1"),
    (lambda _: Tier("private", 5, "belady"), ValueError, "policy must be one of .*, got 'belady'"),
    (lambda _: Tier("private", 5, 5), TypeError, r"policy must be a string, .*, got 5"),  # type: ignore[arg-type]
    (lambda _: GroupChunks.of_blocks(512, block_bytes=-1), ValueError, "block_bytes must be >= 0"),
    *(
        (lambda rows, more=options: replay(**{"trace": rows, "configuration": ONE} | more), *said)
        for options, *said in (
            ({"trace": 5}, TypeError, "trace must be requests, got 5"),
            ({"configuration": 5}, TypeError, "configuration must be a Configuration, got 5"),
            ({"manager": 3}, TypeError, "manager must be an OffloadingManager or None, got 3"),
            ({"parts": 0}, ValueError, "parts must be >= 1, got 0"),
            ({"parts": "a"}, TypeError, "parts must be an integer, got 'a'"),
            ({"progress": 5}, TypeError, "progress must be callable or None, got 5"),
            ({"manager": CPUOffloadingManager(16, 500)}, ValueError, ROOM),
            ({"manager": CPUOffloadingManager(16, 4, "hit-density")}, ValueError, ROOM),
            ({"manager": LRUOffloadingManager(CPUBackend(16, 500))}, ValueError, ROOM),
            (
                {"trace": [], "configuration": Configuration(host=4, groups=STEPS), "manager": LRU},
                TypeError,
                "manager must be a CPUOffloadingManager",
            ),
            *(
                (
                    {"configuration": Configuration(host=9, **other), "manager": LRU},
                    ValueError,
                    "manager must be None with several engines or a ceiling",
                )
                for other in ({"policy": "belady"}, {"policy": "infinite"}, {"engines": 2})
            ),
        )
    ),
    *(
        (
            lambda _, more=options: replay_all(**{"trace": TRACE, "configurations": [ONE]} | more),
            *said,
        )
        for options, *said in (
            ({"trace": Workload(3)}, TypeError, "trace must be a DecodedTrace, got <kvoffload"),
            ({"configurations": 3}, TypeError, "configurations must be .* of Configuration, got 3"),
            ({"configurations": [ONE, 3]}, TypeError, r"configurations\[1\] must be a Config"),
            ({"parts": 0}, ValueError, "parts must be >= 1, got 0"),
            ({"jobs": 0}, ValueError, "jobs must be >= 1, got 0"),
            ({"elsewhere": 5}, TypeError, "elsewhere must be Elsewhere or None, got 5"),
            ({"progress": 5}, TypeError, "progress must be callable or None, got 5"),
        )
    ),
    (lambda _: GroupChunks.of_blocks(step_tokens=64), ValueError, "block_tokens must .*, got 64"),
    (lambda _: GroupChunks.of_blocks(16, step_tokens=0), ValueError, "step_tokens must be >= 1"),
    (lambda _: GroupChunks.of_blocks(2**24 + 1), ValueError, "block_tokens must be <= 16777216"),
    (lambda _: GroupChunks.of(ALONE, 16, step_tokens=0), ValueError, "step_tokens"),
    (lambda _: GroupServer(STEPS, LRU), TypeError, "manager must be a CPUOffloadingManager"),
    *(
        (lambda _, more=options: HintOptions(**{"told": "both"} | more), ValueError, said)
        for options, said in (
            ({"told": "all"}, "told must be one of ends, expect, both, got 'all'"),
            ({"noise": 0.9}, r"noise must be 1 ... 1e\+06, got 0.9"),
            ({"noise": math.nan}, "noise must be"),
            ({"noise": math.inf}, "noise must be"),
            ({"share": -0.1}, "share must be 0 ... 1, got -0.1"),
            ({"liars": 1.1}, "liars must be 0 ... 1, got 1.1"),
            ({"told": "ends", "liars": 0.5}, "liars must go with expect or both"),
            ({"told": "ends", "noise": 2}, "noise must go with expect or both"),
            ({"seed": -1}, "seed must be >= 0, got -1"),
        )
    ),
    *(
        (lambda _, share=value: HintOptions(told="both", share=share), TypeError, "share must be a")
        for value in ("1", True, None)
    ),
    *(
        (lambda rows, more=options: DecodedTrace.of(**{"requests": rows} | more), TypeError, said)
        for options, said in (
            ({"requests": 5}, "requests must be an iterable of Request, got 5"),
            ({"progress": 5}, "progress must be callable or None, got 5"),
            ({"hints": "both"}, "hints must be HintOptions or None, got 'both'"),
            ({"arrivals": 1}, "arrivals must be True or False, got 1"),
        )
    ),
]
"""Calls, which are given requests that they must not read."""


@pytest.mark.parametrize(("options", "error", "said"), OPTIONS)
def test_a_configuration_is_checked(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        Configuration(**{"host": 5} | options)


@pytest.mark.parametrize(("call", "error", "said"), CALLS)
def test_a_call_is_checked_before_it_reads(
    call: Callable[[Iterator[Request]], object], error: type[Exception], said: str
) -> None:
    requests = iter(Workload(3))
    with pytest.raises(error, match=said):
        call(requests)
    assert len([*requests]) == 3


def test_a_ceiling_may_have_more_slots_than_a_manager() -> None:
    found = replay(TRACE, Configuration(policy="belady", host=2**31))
    assert (found.hits, found.configuration.host) == (0, 2**31)


@pytest.mark.parametrize("host", [5, 3])
def test_a_manager_is_empty(host: int) -> None:
    used = CPUOffloadingManager(16, 5)
    assert replay(TRACE, ONE, manager=used).stored == 2
    with pytest.raises(ValueError, match=r"must be empty and .*, got .* 2 of 5 blocks resident"):
        replay(TRACE, Configuration(host=host), manager=used)
