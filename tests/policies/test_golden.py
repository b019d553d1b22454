"""Exact counts of the policies and the ceilings on the public traces of ``tests/replay``.

weka_cc_a, whose times of subagents are wrong, is an input like any other here: its rows are fixed.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="reading traces needs the cli extra")

from kvoffload.policies import registry
from kvoffload.replay import Configuration, DecodedTrace, replay
from kvoffload.replay.offline import CEILINGS
from kvoffload.testing.policies import check_invariants
from tests.conftest import AVAILABLE
from tests.policies.models import MODELS
from tests.policies.steps import request
from tests.replay.test_golden import trace

pytestmark = pytest.mark.fast

CALLED = {
    "python": {("lmcache_agents_64c", 482)},
    "compiled": {("mooncake_conversation", 1_827), ("lmcache_agents_64c", 482)},
}
"""Traces and capacities that a twin replays by the calls of a manager; the others by rows."""

# trace, policy, capacity: hits, stored, evicted, refused
GOLDEN = {
    ("mooncake_conversation", "lru", 1_827): (15_136, 273_364, 271_537, 0),
    ("mooncake_conversation", "lru", 9_139): (56_479, 232_021, 222_882, 0),
    ("mooncake_conversation", "lru", 36_558): (99_632, 188_868, 152_310, 0),
    ("mooncake_conversation", "arc", 1_827): (17_022, 271_476, 269_649, 0),
    ("mooncake_conversation", "arc", 9_139): (52_912, 235_068, 225_929, 0),
    ("mooncake_conversation", "arc", 18_279): (80_064, 208_429, 190_150, 0),
    ("mooncake_conversation", "arc-classic", 1_827): (18_828, 269_672, 267_845, 0),
    ("mooncake_conversation", "arc-classic", 9_139): (60_641, 227_859, 218_720, 0),
    ("mooncake_conversation", "slru", 1_827): (16_789, 271_711, 269_884, 0),
    ("mooncake_conversation", "slru", 9_139): (51_328, 237_172, 228_033, 0),
    ("mooncake_conversation", "lfu", 1_827): (15_970, 272_530, 270_703, 0),
    ("mooncake_conversation", "lfu", 9_139): (59_789, 228_711, 219_572, 0),
    ("mooncake_conversation", "sieve", 1_827): (16_789, 271_711, 269_884, 0),
    ("mooncake_conversation", "sieve", 9_139): (36_564, 251_936, 242_797, 0),
    ("mooncake_conversation", "s3fifo", 1_827): (21_828, 266_672, 264_845, 0),
    ("mooncake_conversation", "s3fifo", 9_139): (54_386, 234_114, 224_975, 0),
    ("mooncake_conversation", "hit-density", 1_827): (31_280, 34_530, 32_703, 0),
    ("mooncake_conversation", "hit-density", 9_139): (63_459, 151_966, 142_827, 0),
    ("mooncake_conversation", "belady", 1_827): (71_078, 48_376, 0, 0),
    ("mooncake_conversation", "belady", 9_139): (105_710, 44_144, 0, 0),
    ("mooncake_conversation", "infinite", 1_827): (105_710, 182_790, 0, 0),
    ("lmcache_agents_64c", "lru", 482): (74_376, 75_004, 74_522, 101),
    ("lmcache_agents_64c", "lru", 2_413): (206_465, 36_354, 33_941, 0),
    ("lmcache_agents_64c", "arc", 482): (69_257, 75_737, 75_255, 101),
    ("lmcache_agents_64c", "arc", 2_413): (202_617, 39_049, 36_636, 0),
    ("lmcache_agents_64c", "arc-classic", 482): (77_974, 71_538, 71_056, 101),
    ("lmcache_agents_64c", "arc-classic", 2_413): (205_529, 37_286, 34_873, 0),
    ("lmcache_agents_64c", "slru", 482): (77_446, 73_352, 72_870, 101),
    ("lmcache_agents_64c", "slru", 2_413): (207_241, 35_578, 33_165, 0),
    ("lmcache_agents_64c", "lfu", 482): (77_096, 74_094, 73_612, 101),
    ("lmcache_agents_64c", "lfu", 2_413): (198_640, 44_179, 41_766, 0),
    ("lmcache_agents_64c", "sieve", 482): (71_175, 73_234, 72_752, 101),
    ("lmcache_agents_64c", "sieve", 2_413): (203_288, 38_032, 35_619, 0),
    ("lmcache_agents_64c", "s3fifo", 482): (79_379, 72_282, 71_800, 101),
    ("lmcache_agents_64c", "s3fifo", 2_413): (198_209, 44_610, 42_197, 0),
    ("lmcache_agents_64c", "hit-density", 482): (98_068, 36_696, 36_214, 0),
    ("lmcache_agents_64c", "hit-density?guard=0", 482): (99_900, 32_450, 31_968, 0),
    ("lmcache_agents_64c", "hit-density", 2_413): (206_782, 32_496, 30_083, 0),
    ("lmcache_agents_64c", "hit-density?guard=0", 2_413): (207_888, 30_305, 27_892, 0),
    ("lmcache_agents_64c", "belady", 482): (120_158, 17_926, 0, 0),
    ("lmcache_agents_64c", "belady", 2_413): (213_691, 20_127, 0, 0),
    ("lmcache_agents_64c", "infinite", 482): (218_689, 24_130, 0, 0),
    ("weka_cc_a", "lru", 1_676): (1_311_098, 3_250_955, 3_249_279, 14),
    ("weka_cc_a", "arc", 1_676): (1_246_928, 3_246_583, 3_244_907, 14),
    ("weka_cc_a", "arc-classic", 1_676): (1_481_665, 3_074_551, 3_072_875, 14),
    ("weka_cc_a", "slru", 1_676): (1_513_680, 3_048_373, 3_046_697, 14),
    ("weka_cc_a", "lfu", 1_676): (1_390_330, 3_171_723, 3_170_047, 14),
    ("weka_cc_a", "sieve", 1_676): (1_404_472, 3_147_518, 3_145_842, 14),
    ("weka_cc_a", "s3fifo", 1_676): (1_601_113, 2_960_940, 2_959_264, 14),
    ("weka_cc_a", "hit-density", 1_676): (2_042_680, 796_973, 795_297, 0),
    ("weka_cc_a", "belady", 1_676): (2_821_537, 823_757, 0, 0),
    ("weka_cc_a", "infinite", 1_676): (4_418_251, 167_619, 0, 0),
}


@functools.cache
def decoded(name: str) -> DecodedTrace:
    return DecodedTrace.of(trace(name))


def case(*values: Any, is_long: bool) -> Any:
    """Return the parameters of a test, which a plain run leaves out if it is long."""
    return pytest.param(*values, marks=[pytest.mark.thorough] * is_long)


@pytest.mark.parametrize(
    ("twin", "name", "policy", "capacity"),
    [
        # the Python twin takes many times as long as the compiled one, which is the last
        case(twin, name, policy, capacity, is_long=twin != AVAILABLE[-1])
        for twin in AVAILABLE
        for name, policy, capacity in GOLDEN
        if policy not in CEILINGS and (name, capacity) in CALLED[twin]
    ],
    indirect=["twin"],
)
def test_counts(twin: ModuleType, name: str, policy: str, capacity: int) -> None:
    whole = decoded(name)
    manager = twin.CPUOffloadingManager(16, capacity, policy)
    keys = whole.keys()
    for row in whole.rows():
        request(manager, [keys[block] for block in row])
    stats = manager.stats()
    found = (stats["hit_blocks"], stats["stored_blocks"], stats["evicted_blocks"])
    assert (*found, stats["refused_stores"]) == GOLDEN[name, policy, capacity]
    check_invariants(manager)


@pytest.mark.parametrize("name", ["mooncake_conversation", "lmcache_agents_64c", "weka_cc_a"])
def test_what_is_counted_on_one_trace_is_on_all(name: str) -> None:
    counted = {key[1].partition("?")[0] for key in GOLDEN if key[0] == name}
    assert counted == {key[1].partition("?")[0] for key in GOLDEN}
    assert counted <= {*registry.names(), *CEILINGS}


@pytest.mark.parametrize("policy", registry.names())
def test_every_policy_has_a_model_or_tests_of_its_own(policy: str) -> None:
    file = Path(__file__).with_name(f"test_{policy.replace('-', '_')}.py")
    assert policy in MODELS or file.is_file(), "which block leaves? a model says so"


@pytest.mark.parametrize(
    ("name", "policy", "capacity"),
    [
        case(*key, is_long=key[0] == "weka_cc_a")
        for key in GOLDEN
        if key[1] in CEILINGS or (key[0], key[2]) not in CALLED["compiled"]
    ],
)
def test_counts_of_rows(name: str, policy: str, capacity: int) -> None:
    found = replay(decoded(name), Configuration(policy=policy, host=capacity))
    expected = GOLDEN[name, policy, capacity]
    assert (found.hits, found.stored) == expected[:2]
    if policy not in CEILINGS:  # which evict and refuse nothing that is counted
        assert (found.evicted, found.refused) == expected[2:]
