"""Every documented option of the storage, with wrong values: the start fails and names the option.

Which options there are is read from the guide's table and compared with those that the code takes,
so that a new one needs a row there and wrong values here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from kvoffload.integrations.sglang import storage as module
from tests.sglang.engine import config, device_pool, host_pool, storage

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "sglang.md"
FINDING = {"backend_name", "module_path", "class_name"}  # by which SGLang finds the class
PREFIX = "hicache_storage_pass_prefix_keys"
TEXT = (5, True, ["a"], {})
WRONG = {
    "interface_v1": ("no", "1", None, 2, []),
    PREFIX: ("yes", 1, None),
    "url": ("", "nonesuch:x", "slab:", "memory:?capacity=1MiB&events=perhaps", None, *TEXT),
    "pools": (
        *(5, True, ["mamba"], None, {"kv": "memory:?capacity=1MiB"}, {"mambo": "memory:"}),
        *({"mamba": value} for value in ("", None, 5, ["memory:"])),
    ),
    "weights_id": ("", *TEXT),
    "revision": TEXT,
    "salt": TEXT,
    "generation": ("x" * 65, "two\nlines", *TEXT),
    "generation_file": TEXT,
}
#: Where null is no wrong value, but as without the option.
NULL = {"weights_id", "revision", "salt", "generation", "generation_file"}


def test_every_option_that_is_documented_or_read_has_wrong_values_here():
    (table,) = re.findall(
        r"(?m)^\| option \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE.read_text("utf-8")
    )
    named = {
        name for row in table.splitlines() for name in re.findall("`([^`]+)`", row.split(" | ")[0])
    }
    assert named == FINDING | WRONG.keys()
    assert {*module._OPTIONS, *module._OF_SGLANG} == named - {PREFIX}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param(option, value, id=f"{option}={value!r}")
        for option, values in WRONG.items()
        for value in values
    ],
)
def test_a_wrong_value_is_named_by_its_option(option, value):
    with pytest.raises((TypeError, ValueError), match=rf"(?<!\w){option}\b"):
        start({option: value})


def start(extra):
    if PREFIX in extra:  # which SGLang takes out before it makes a storage
        HybridCacheController.parse_storage_backend_extra_config(json.dumps(extra))
    storage("memory:?capacity=1MiB", host_pool(device_pool()), extra=extra)


def test_null_is_a_wrong_value_but_where_it_is_as_without_the_option():
    assert {option for option, values in WRONG.items() if None not in values} == NULL
    pool = host_pool(device_pool())
    plain = storage("memory:?capacity=1MiB", pool)
    with_nulls = storage("memory:?capacity=1MiB", pool, extra=dict.fromkeys(NULL))
    assert with_nulls.namespace == plain.namespace


@pytest.mark.parametrize("value", [0, 1, False, True])
def test_interface_v1_is_a_number_or_a_truth_value(value):
    made = module.KVOffloadStorage(config("memory:?capacity=1MiB", extra={"interface_v1": value}))
    assert made._is_copying is not bool(value)
