"""vLLM's own tests of its secondary tiers and of the manager above them, run on our tiers.

``KVOFFLOAD_VLLM_TESTS`` names a folder with ``tests/v1/kv_offload`` of the sources of the release
that is installed; a wheel has no tests.
"""

from __future__ import annotations

import pytest
import vllm

from tests.vllm.test_upstream import SOURCES, run

MODULES = ("tiering/test_fs_tier", "tiering/test_tiering_offloading")

#: Why a test cannot pass here.
KNOWN = {
    "test_store_accepts_block_published_by_another_writer": "lists the folder of a chunk's file",
    "test_invalid_path_raises_at_construction": "expects an OSError; it is a TierError",
    "test_shutdown_discards_pending_tasks": "reads the queues of vLLM's threads",
    "test_store_load_roundtrip_without_o_direct": "reads `_use_o_direct`",
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": "a chunk's file must be gone",
    "test_failed_load_after_abort_does_not_break_newer_probe": "wants RETRY; a slab answers",
    "test_batched_partial_load_failure_keeps_loaded_blocks": "cuts a chunk's file, here all",
    "test_transient_load_failure_leaves_file": "puts a link in the place of a file that is open",
    "test_mixed_job_results_emit_event_only_for_successful_job": "replaces vLLM's writing of files",
    "test_partially_failed_store_emits_no_event": "replaces vLLM's writing of files",
}
#: How many pass, at least, by release.
LEAST = {"0.31": 81, "0.32": 87, "0.33": 97}


@pytest.mark.nightly
@pytest.mark.skipif(not SOURCES, reason="no tests of vLLM: KVOFFLOAD_VLLM_TESTS is unset")
def test_vllm_s_tests_of_tiers_pass_on_ours(tmp_path):
    passed, failed = [], {}
    for case in run(tmp_path, MODULES, "upstream_tiers", "kvoffload_secondary_tiers"):
        name = case.get("name").partition("[")[0]
        wrong = [*case.findall("failure"), *case.findall("error")]
        if wrong:
            failed[name] = wrong[0].get("message")
        elif case.find("skipped") is None:
            passed.append(name)
    print(f"{len(passed)} passed, {len(failed)} cannot pass")
    assert not {name: text for name, text in failed.items() if name not in KNOWN}
    assert not set(passed) & KNOWN.keys() - failed.keys(), "listed, but they pass"
    assert len(passed) >= LEAST[vllm.__version__.rpartition(".")[0]]
