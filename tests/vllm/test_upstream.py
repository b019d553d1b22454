"""vLLM's own tests, of the release that is installed, run on the managers and the tiers here.

They are fetched by `.ci/vllm-tests`; what it prints goes into ``KVOFFLOAD_VLLM_TESTS``. A test that
passes on vLLM's manager passes here or is listed with the reason why it cannot.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvoffload.integrations.vllm._upstream import installed_release
from tests.isolated.scripts import run_python

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("KVOFFLOAD_VLLM_TESTS", "")
MODULES = ("cpu/test_manager", "tiering/test_tiering_offloading")
MODULES_OF_TIERS = ("tiering/test_fs_tier", "tiering/test_tiering_offloading")

pytestmark = pytest.mark.skipif(
    not SOURCES, reason="no tests of vLLM: KVOFFLOAD_VLLM_TESTS is unset; see .ci/vllm-tests"
)


def run(folder: Path, paths: Iterable[str], *plugin: str) -> list[ET.Element]:
    """Run tests of vLLM with a plug-in from a folder beside this file; return their cases."""
    report = folder / f"{len(plugin)}.xml"
    plugins = [str(Path(__file__).parent / name) for name in plugin[:1]]
    done = run_python(
        *("-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider"),
        *("-c", os.devnull, "--rootdir", SOURCES, f"--junitxml={report}"),
        *(option for name in plugin[1:] for option in ("-p", name)),
        *(f"tests/v1/kv_offload/{path}.py" for path in paths),
        cwd=SOURCES,
        env={
            **{name: os.environ[name] for name in ("HOME", "PATH")},
            "PYTHONPATH": os.pathsep.join([*plugins, str(ROOT)]),
            "KVOFFLOAD_PURE_PYTHON": "0",
        },
        timeout=900,
    )
    assert report.exists(), done.stdout + done.stderr
    found = list(ET.parse(report).iter("testcase"))
    assert found, done.stdout + done.stderr
    return found


def outcomes(folder: Path, *plugin: str) -> dict[str, str]:
    """Return by module and name how each of vLLM's tests has ended: "", or how it failed."""
    found = {}
    for case in run(folder, MODULES, *plugin):
        wrong = [one for kind in ("failure", "error", "skipped") for one in case.findall(kind)]
        text = wrong[0].get("message", "failed") if wrong else ""
        found[f"{case.get('classname')}.{case.get('name')}"] = text
    return found


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    folder = tmp_path_factory.mktemp("upstream")
    return outcomes(folder), outcomes(folder, "upstream", "kvoffload_managers")


#: Why a test that passes on vLLM's manager cannot pass here, by its name without parameters.
KNOWN = {
    "test_batch_eviction_failure_is_atomic": "compares statuses by identity; here they are copies",
    "test_batch_eviction_falls_back_after_t1_iterator_exhausted": "writes to the policy's statuses",
    "test_batch_eviction_scans_t1_and_t2_once": "counts what is read of lists that it puts in",
    "test_cpu_manager_reports_allocation_size_on_allocation_failure": "replaces `_allocate_chunks`",
    "test_evictable_cache_chunk_count": "reads `_num_evictable_cache_chunks`",
    "test_failed_store_records_access_once_and_uses_store_miss_hook": "replaces hooks of `_policy`",
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": "reads the policy's `_heap`",
    "test_request_finish_forwards_grouped_deduplicated_accesses": "replaces hooks of `_policy`",
    "test_touch_forwards_req_context_to_policy": "replaces hooks of `_policy`",
    "test_touch_propagates_to_all_tiers": "reads the policy's `_ranks`",
    "test_reset_cache_clears_orchestrator_state": "reads `_num_allocated_chunks`",
}

#: The same of the tiers.
KNOWN_OF_TIERS = {
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

#: How many of its manager's, of its primary tier's and of its secondary tiers' tests pass here, at
#: least: of older releases, and of 0.33 and newer ones.
LEAST = {"0.31": (42, 54, 81), "0.32": (42, 60, 87)}.get(installed_release().name, (59, 70, 97))


def judge(theirs_and_ours, module: str, least: int) -> None:
    """Compare the outcomes of one module; `least` tests pass on the managers here."""
    theirs, ours = (
        {name: text for name, text in found.items() if module in name} for found in theirs_and_ours
    )
    assert ours
    assert ours.keys() == theirs.keys()
    failed = {name: text for name, text in ours.items() if text and not theirs[name]}
    short = {name: name.partition("[")[0].rpartition(".")[2] for name in failed}
    assert not {name: text for name, text in failed.items() if short[name] not in KNOWN}
    passing = {
        name
        for name, text in ours.items()
        if not text and name.rpartition(".")[2].partition("[")[0] in KNOWN
    }
    assert not passing, "listed, but they pass"
    passed = sum(not text for text in ours.values())
    print(f"{module}: {passed} of {len(ours)}")
    assert passed >= least, f"{passed} of {len(ours)}"


def test_vllm_s_tests_of_its_manager(theirs_and_ours):
    judge(theirs_and_ours, "test_manager", LEAST[0])


def test_vllm_s_tests_of_its_tiers(theirs_and_ours):
    judge(theirs_and_ours, "test_tiering_offloading", LEAST[1])


@pytest.mark.nightly
def test_vllm_s_tests_of_tiers_pass_on_ours(tmp_path):
    passed, failed = [], {}
    for case in run(tmp_path, MODULES_OF_TIERS, "upstream_tiers", "kvoffload_secondary_tiers"):
        name = case.get("name").partition("[")[0]
        wrong = [*case.findall("failure"), *case.findall("error")]
        if wrong:
            failed[name] = wrong[0].get("message")
        elif case.find("skipped") is None:
            passed.append(name)
    print(f"{len(passed)} passed, {len(failed)} cannot pass")
    assert not {name: text for name, text in failed.items() if name not in KNOWN_OF_TIERS}
    assert not set(passed) & KNOWN_OF_TIERS.keys() - failed.keys(), "listed, but they pass"
    assert len(passed) >= LEAST[2]
