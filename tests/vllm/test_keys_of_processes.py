"""Whose keys are equal, as the guide to tiers says: engines that share a tier need equal ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json
from vllm.utils.hashing import sha256, sha256_cbor, xxhash
from vllm.v1.core import kv_cache_utils as utils

found = {"xxhash": utils.resolve_none_hash_seed(xxhash)}  # which its keys begin with
for function in (sha256, sha256_cbor):
    utils.init_none_hash(function)
    parent = None
    for start in (1, 17):
        tokens = tuple(range(start, start + 16))
        parent = utils.hash_block_tokens(function, parent, tokens)
    found[function.__name__] = parent.hex()
print(json.dumps(found))
"""


def keys_of_processes(*seeds: str | None) -> list[dict[str, str]]:
    """Return what other processes have as the key of a second block, by hash function."""
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    started = [
        subprocess.Popen(
            command,
            env=unset | ({} if seed is None else {"PYTHONHASHSEED": seed}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    outputs = [process.communicate()[0] for process in started]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.nightly
def test_keys_of_sha256_are_equal_without_a_seed_and_differ_where_one_process_has_it():
    first, second, seeded = keys_of_processes(None, None, "0")
    assert first["sha256"] == second["sha256"]
    assert first["sha256_cbor"] == second["sha256_cbor"]
    assert first["xxhash"] != second["xxhash"]
    for name in first:
        assert first[name] != seeded[name], name
