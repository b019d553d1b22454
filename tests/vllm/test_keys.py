"""Every documented key of the configuration, with wrong values: the start fails and names the key.

Which keys there are is read from the tables of the guides, and compared with those that the code
takes; so a new key needs a row there and wrong values here.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import Locality

from kvoffload.integrations.vllm import (
    KVOffloadFileTier,
    KVOffloadManager,
    KVOffloadTier,
    spec,
    watching,
)
from kvoffload.integrations.vllm.secondary_tiers import SecondaryTier
from tests.vllm.configuration import CHUNK_BYTES, PACKAGE, create
from tests.vllm.tiered import OURS

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"
SPEC = {"spec_name": "KVOffloadSpec", "spec_module_path": PACKAGE}
FLAG = ("yes", "no", 2, None, [])
NUMBER = ("many", "", None, True, [1], float("nan"))
BYTES = ("many", "", True, [1], 1.5, -1)
TEXT = (5, True, ["a"], {})
POLICY = ("nonesuch", "", None, "lru?x=1", "slru?protected=2", "slru?protected", *TEXT)

#: By key of ``kv_connector_extra_config``, what it cannot be.
KEYS = {
    "cpu_bytes_to_use": (*NUMBER, "64GiB", -1, 0, 64),
    "eviction_policy": POLICY,
    "cache_policy_module_path": ("nonesuch.module", "tests.vllm.configuration", "", *TEXT),
    "store_threshold": NUMBER,
    "max_tracker_size": (*NUMBER, 0, -1),
    "offload_prompt_only": FLAG,
    "self_describing_kv_events": FLAG,
    "kvoffload_record": (5, True, "requests.txt", "", ["a.gz"]),
    "kvoffload_record_max_bytes": (*NUMBER, "1GiB", 0, 65_535, 1.5),
    "kvoffload_watch": (*FLAG, 0, {"nonesuch": 1}),
}
#: By key of ``kvoffload_watch``.
WATCH_KEYS = {
    "memory": (2, "2", [0], ["2"], None),
    "policies": (5, "lru", ["nonesuch"], [5], None),
    "slots": (*NUMBER, 0, 1.5),
    "policy_slots": (*NUMBER, 0, 1.5),
    "max_rate": (*NUMBER, 0, 2),
    "window": (*NUMBER, 0, -1),
    "deadline": (*NUMBER, 0, -1),
    "interval": (*NUMBER, 0, -1),
}
#: By key of an entry of ``secondary_tiers``.
TIER_KEYS = {
    "path": ("", None, *TEXT),
    "capacity_bytes": (*BYTES, None, 0, 5),
    "policy": POLICY,
    "generation": ("x" * 65, "two\nlines", None, *TEXT),
    "generation_file": ("", *TEXT),
    "on_reset": ("drop", "", None, *TEXT),
    "weights_id": ("", *TEXT),
    "revision": TEXT,
    "salt": TEXT,
    "enable_kv_events": (*FLAG, 0, 1),
    "locality": ("LOKAL", "local", "", Locality.LOCAL, *TEXT),
    "threads": ("8", "", True, [1], 1.5, 0, -1, 10_000),
    "staged": (*FLAG, 0, 1),
    "staging_bytes": BYTES,
    "ack": ("written", "", *TEXT),
    "max_queued_bytes": BYTES,
    "name": TEXT,
    "backpressure": ("yes", True, 5, ["a"], {}, None),
    "url": ("", "nonesuch:x", "slab:", "slab:x?capacity=1MB&staged=perhaps", None, *TEXT),
}
#: Where null is no wrong value: what it stands for is in the guides.
NULL = {"cache_policy_module_path", "kvoffload_record"}
TIER_NULL = {
    *("weights_id", "revision", "salt", "locality", "threads", "staging_bytes", "ack"),
    *("generation_file", "max_queued_bytes", "name"),
}


def documented(pattern: str) -> set[str]:
    """Return the first cells of the guides' tables of keys and of options, as names."""
    found = set()
    for page in sorted(GUIDES.glob(pattern)):
        for table in re.findall(
            r"(?m)^\| (?:key|option)\b.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text("utf-8")
        ):
            for row in table.splitlines():
                found.update(re.findall(r"`([^`]+)`", row.split(" | ")[0]))
    return found


def keywords(*classes: type) -> set[str]:
    """Return the keywords of constructors, without those that vLLM or a subclass gives."""
    return {
        name
        for one in classes
        for name, parameter in inspect.signature(one.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    } - {"backpressure_detector"}


def test_every_key_that_is_documented_or_read_has_wrong_values_here():
    assert documented("vllm*.md") == KEYS.keys() | TIER_KEYS.keys()
    assert documented("watch.md") | {"interval"} == WATCH_KEYS.keys()
    checked = {*spec._WHOLE, *spec._FLAGS, *spec._TEXTS}
    assert {*spec.OPTIONS} | checked == KEYS.keys()
    assert {*watching.OPTIONS, "interval"} == WATCH_KEYS.keys()
    own = keywords(KVOffloadFileTier, KVOffloadTier, SecondaryTier)
    assert own | {"backpressure"} == TIER_KEYS.keys()


@pytest.mark.parametrize(
    ("keys", "meant"), [(KEYS, NULL), (WATCH_KEYS, set()), (TIER_KEYS, TIER_NULL)]
)
def test_null_is_a_wrong_value_but_where_it_is_meant(keys, meant):
    assert {key for key, values in keys.items() if None not in values} == meant


@pytest.mark.parametrize("key", sorted(NULL))
def test_null_is_as_without_the_key(key):
    manager = create(4, **SPEC, **{key: None}).get_manager()
    assert type(manager) is KVOffloadManager
    assert "prepare_store" not in vars(manager)  # not recorded


def test_null_is_as_without_the_option_of_a_tier(tmp_path):
    """But for `locality`: where it is null, vLLM's filters and events know none."""

    def start(folder, **options):
        entry = {
            "type": "KVOffloadFileTier",
            "module_path": PACKAGE,
            "path": str(tmp_path / folder),
        }
        entry |= {"capacity_bytes": 8 * CHUNK_BYTES, **options}
        extra = {**OURS, "secondary_tiers": [entry]}
        manager = create(4, **extra).get_manager()
        (made,) = manager.secondary_tiers
        found = made.namespace, made.tier.name, made.tier.stats(), made.locality
        manager.shutdown()
        return found

    *plain, locality = start("plain")
    *with_nulls, unknown = start("null", **dict.fromkeys(TIER_NULL))
    assert with_nulls == plain
    assert (locality, unknown) == (Locality.LOCAL, None)


def cases(keys):
    return [
        pytest.param(key, value, id=f"{key}={value!r}")
        for key, values in keys.items()
        for value in values
    ]


def assert_named(key, extra):
    with pytest.raises((TypeError, ValueError), match=rf"(?<!\w){key}\b"):
        create(4, **extra).get_manager()


@pytest.mark.parametrize(("key", "value"), cases(KEYS))
def test_a_wrong_value_is_named_by_its_key(key, value, tmp_path):
    needed = {
        "cache_policy_module_path": {"eviction_policy": "Nonesuch"},
        "kvoffload_record_max_bytes": {"kvoffload_record": str(tmp_path / "requests.jsonl.gz")},
    }
    assert_named(key, {**SPEC, **needed.get(key, {}), key: value})


@pytest.mark.parametrize(("key", "value"), cases(WATCH_KEYS))
def test_a_wrong_value_of_the_watch_is_named_by_both_keys(key, value):
    for name in (key, "kvoffload_watch"):
        assert_named(name, {**SPEC, "kvoffload_watch": {key: value}})


@pytest.mark.parametrize(("key", "value"), cases(TIER_KEYS))
@pytest.mark.parametrize("tier", [KVOffloadFileTier, KVOffloadTier])
def test_a_wrong_value_of_a_tier_is_named_by_its_key(key, value, tier, tmp_path):
    given = {
        KVOffloadFileTier: {"path": str(tmp_path / "kv"), "capacity_bytes": 8 * CHUNK_BYTES},
        KVOffloadTier: {"url": "memory:?capacity=1MiB"},
    }
    if key not in given[tier].keys() | keywords(tier, SecondaryTier) | {"backpressure"}:
        value = "unknown keys are named, too"
    entry = {"type": tier.__name__, "module_path": PACKAGE, **given[tier], key: value}
    assert_named(key, {**OURS, "secondary_tiers": [entry]})
    assert not list(tmp_path.rglob("blocks.dat"))


@pytest.mark.parametrize("value", ["yes", 5, {}, ["a"], [5], None])
def test_secondary_tiers_that_are_no_list_of_objects_are_named(value):
    assert_named("secondary_tiers", {**OURS, "secondary_tiers": value})


@pytest.mark.parametrize("value", [[{"type": "fs"}], {}, "", None])
def test_secondary_tiers_behind_the_spec_that_has_none_are_named(value):
    assert_named("secondary_tiers", {**SPEC, "secondary_tiers": value})


def test_numbers_that_vllm_takes_stay_right():
    extra = {"store_threshold": "3", "max_tracker_size": 7.0, "offload_prompt_only": 0}
    extra |= {"self_describing_kv_events": True}
    manager = create(4, **SPEC, **extra).get_manager()
    assert (manager.store_threshold, manager.max_tracker_size) == (3, 7)
