"""The engine's answers, what it saved, and that its metrics are those of vLLM's own manager."""

from __future__ import annotations

import pytest

pytest.importorskip("tests.engine.kernels", reason="needs an engine; see .ci/vllm-env --engine")

from tests.engine.runs import NUM_ASKED_AGAIN, NUM_CHUNKS, NUM_TURNS, POLICIES
from tests.engine.server import BLOCK_TOKENS

ALIKE = [("vllm lru", "lru"), ("vllm arc", "arc")]
EVERY_RELEASE = {"none", "vllm lru", "lru"}  # the runs that are made with each
AT_ONCE = ("lru", "sieve", "hit-density")  # the policies that each change is tried with
NIGHTLY = {"vllm arc", *(f"{name} at once" for name in POLICIES if name not in AT_ONCE)}
ONE_BY_ONE = ("vllm lru", "vllm arc", "lru", "arc")


def runs_of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.engine_runs("none", *names)


def parameter(*names: str):
    marks = [runs_of(*names)]
    if set(names) <= EVERY_RELEASE:
        marks.append(pytest.mark.every_release)
    if not NIGHTLY.isdisjoint(names):
        marks.append(pytest.mark.nightly)
    return pytest.param(*names, marks=marks)


def tokens(answers):
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("name", [parameter(name) for name in ("lru", "arc")])
def test_two_keys_of_the_configuration_turn_it_on_and_the_log_says_so(runs, name):
    assert f"kvoffload: compiled manager active, policy {name}, {NUM_CHUNKS} chunks" in (
        runs[name].log
    )


@runs_of("vllm lru")
@pytest.mark.every_release
def test_without_the_keys_it_is_vllm_s_own(runs):
    assert "kvoffload: " not in runs["vllm lru"].log


@pytest.mark.parametrize("name", [parameter(name) for name in ONE_BY_ONE])
def test_every_answer_is_that_of_an_engine_that_does_not_offload(runs, name):
    assert len(runs[name].answers) == NUM_TURNS
    assert tokens(runs[name].answers) == tokens(runs["none"].answers)


@pytest.mark.parametrize("name", [parameter(name) for name in ONE_BY_ONE])
def test_fewer_tokens_are_computed(runs, name):
    without, with_it = runs["none"].metrics, runs[name].metrics
    assert without.loaded_tokens == 0
    assert with_it.loaded_tokens > 0.2 * without.computed_tokens
    assert with_it.computed_tokens + with_it.loaded_tokens == without.computed_tokens
    assert with_it.device_tokens == without.device_tokens


@pytest.mark.parametrize(("theirs", "ours"), [parameter(*pair) for pair in ALIKE])
def test_the_metrics_are_those_of_vllm_s_manager(runs, theirs, ours):
    expected, found = runs[theirs].metrics.decisions(), runs[ours].metrics.decisions()
    assert found == expected
    counted = {name for name, _ in found}
    assert len(counted) >= 13
    for name in ("load_bytes_total", "store_bytes_total", "cpu_allocation_size_sum"):
        assert runs[ours].metrics.value(f"vllm:kv_offload_{name}") > 0


@runs_of("lru", "arc")
def test_the_two_policies_differ_so_that_a_comparison_could_fail(runs):
    assert runs["lru"].metrics.decisions() != runs["arc"].metrics.decisions()


@pytest.mark.parametrize("name", [parameter(f"{name} at once") for name in POLICIES])
def test_every_policy_answers_every_request_of_many_at_once(runs, name):
    """While transfers are really pending, and clients hang up."""
    run = runs[name]
    assert tokens(run.answers) == tokens(runs["none"].answers)[: len(run.answers)]
    assert tokens(run.crowded) == tokens(runs["none"].crowded)
    assert run.metrics.loaded_tokens > 0
    # Of the requests whose client hung up not all were answered to their end all the same.
    ended = run.metrics.value("vllm:request_success_total", finished_reason="length")
    assert ended < len(run.answers) + len(run.crowded) + run.abandoned


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param(policies, marks=parameter(*(f"{name} at once" for name in policies)).marks)
        for policies in (AT_ONCE, POLICIES)
    ],
    ids=["some", "all"],
)
def test_requests_of_many_at_once_are_preempted(runs, policies):
    """In most of the runs: in one of them it depends on when requests arrive."""
    metrics = [runs[f"{name} at once"].metrics for name in policies]
    with_some = [one for one in metrics if one.value("vllm:num_preemptions_total") > 0]
    assert len(with_some) > len(metrics) / 2


@pytest.mark.engine_runs("arc", "zeros")
def test_a_worker_that_loads_zeros_spoils_every_answer(runs):
    """The control: the other tests would see wrong bytes."""
    right, wrong = runs["arc"], runs["zeros"]
    assert len(right.first) == NUM_ASKED_AGAIN
    assert tokens(right.first) == tokens(wrong.first) == tokens(right.second)
    for first, second in zip(wrong.first, wrong.second, strict=True):
        assert second.cached_tokens >= BLOCK_TOKENS
        assert second.token_ids != first.token_ids


def errors(log: str) -> list[str]:
    """Return what the engine core failed at.

    The server's own process complains at times that the core it has just stopped is gone.
    """
    return [
        line
        for line in log.splitlines()
        if ("(EngineCore" in line and "Traceback" in line) or line.startswith("Process EngineCore")
    ]


@pytest.mark.parametrize("name", [parameter(name) for name in ("none", *ONE_BY_ONE)])
def test_the_server_stops_as_users_stop_it_and_leaves_nothing(runs, name):
    """With no transfer under way; that no process and no shared memory is left, `stop` checks."""
    run = runs[name]
    assert run.status == 0
    assert not errors(run.log)
    for which in ("", "_read", "_write"):
        assert run.metrics.value(f"vllm:kv_offload_cpu_cache{which}_usage_perc") == 0


@pytest.mark.parametrize("name", [parameter(f"{name} at once") for name in POLICIES])
def test_at_an_orderly_end_nothing_is_pinned_and_all_invariants_hold(runs, name):
    run = runs[name]
    assert run.status == 0
    assert not errors(run.log)
    assert run.report == {
        "manager": "KVOffloadManager",
        "checked": True,
        "open_transfers": 0,
        "open_requests": 0,
        "in_use": 0.0,
    }
