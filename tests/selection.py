"""Which tests a run has when it is not told: three circles, each in the next.

``pytest -m fast``
    The core of each area, half a minute: `FAST`.
``pytest``
    All but what is long: a minute on two cores.
``pytest tests``, or any other path, or ``-m`` with any other expression
    All that the path or the expression names. ``.ci/run`` runs `THOROUGH` by ``-m thorough``;
    servers and attacks on tiers have steps of their own.

The lists name files, or single tests of a file that stays. A test may also carry a mark itself,
such as ``@pytest.mark.thorough``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAST = (
    "advise/test_details.py",
    "advise/test_economy.py",
    "advise/test_model_config.py",
    "advise/test_units.py",
    "cli/test_block_size.py",
    "cli/test_convert.py",
    "contract/test_arc.py",
    "contract/test_complete_store.py",
    "contract/test_errors.py",
    "contract/test_events.py",
    "contract/test_load.py",
    "contract/test_lookup.py",
    "contract/test_lru.py",
    "contract/test_machine.py",
    "contract/test_policies.py",
    "contract/test_pool.py",
    "contract/test_reset.py",
    "contract/test_stats.py",
    "contract/test_store.py",
    "contract/test_touch.py",
    "differential/test_mistakes.py",
    "differential/test_policies.py",
    "differential/test_surface.py",
    "house/test_check.py",
    "house/test_layout.py",
    "house/test_reference.py",
    "policies/test_arc_classic.py",
    "policies/test_chains.py",
    "policies/test_golden.py",
    "policies/test_lfu.py",
    "policies/test_s3fifo.py",
    "policies/test_sieve.py",
    "policies/test_slru.py",
    "replay/test_golden.py",
    "replay/test_offline.py",
    "replay/test_statistics.py",
    "replay/test_timed.py",
    "tiers/test_epoch.py",
    "tiers/test_memory.py",
    "tiers/test_parts.py",
    "tiers/test_tiered_store.py",
    "traces/test_merged.py",
    "traces/test_survey.py",
    "traces/test_workload.py",
    "traces/test_writer.py",
    "watch/test_golden.py",
)

THOROUGH = (
    # processes that run for seconds, or one for each case: a leak is seen after many rounds only
    "isolated/test_collector.py",
    "isolated/test_flooding.py",
    "isolated/test_leaks.py",
    "isolated/test_memory.py",
    "isolated/test_objects.py",
    "isolated/test_threads.py",
    "contract/test_optimised.py",
    # the command in a shell, a terminal, a full disk, a closed pipe
    "cli/test_advise.py",
    "cli/test_groups.py",
    "cli/test_interrupts.py",
    "cli/test_outputs.py",
    "cli/test_streams.py",
    "cli/test_sweep.py",
    "cli/test_top.py",
    "cli/test_vocabulary.py",
    "traces/test_outputs.py",
    "traces/test_recorder.py",
    # long workloads: what a policy is worth, not what it does
    "policies/test_hit_density_workloads.py",
    "differential/test_large.py",
    # long by their nature, in files that are not
    "cli/test_commands.py::test_a_terminal_gets_a_progress_bar_on_standard_error_unless_quiet_or_dumb",
    "cli/test_implementation.py::test_quiet_and_what_drives_no_manager_do_not_mention_it",
    "cli/test_replay.py::test_the_table_fits_the_width_and_cuts_no_number",
    "cli/test_usage.py::test_standard_input_that_is_not_read_is_named",
    "differential/test_in_flight.py::test_the_twins_agree_whatever_is_in_flight",
    "differential/test_waiting.py::test_the_twins_agree_while_ends_of_chains_are_in_use",
    "isolated/test_choice.py::test_all_twins_or_none",
    "policies/test_guard.py::test_the_twins_agree_on_requests_that_come_twice",
    "policies/test_guard.py::test_the_twins_follow_the_same_rule",
    "policies/test_guard.py::test_the_twins_measure_one_lag",
    "tiers/test_collector.py::test_scrapes_beside_a_tier_at_work",
    "traces/test_formats.py::test_a_parser_yields_a_request_or_raises_bad_line_error",
    "traces/test_formats.py::test_bailian_takes_bounded_memory_however_long_the_names_of_chats_are",
    "traces/test_reader.py::test_a_decompression_bomb_takes_bounded_memory",
    "traces/test_reader.py::test_a_slow_pipe_is_recognised_however_little_it_gives_at_first",
    "traces/test_reader.py::test_reads_standard_input",
    "watch/test_truth.py",
    "watch/test_twins.py::test_the_twins_see_the_same_of_a_long_run",
    "watch/test_watch.py::test_where_stores_overlap_the_points_are_right_and_without_marks",
    # the build, and the code of documents and examples
    "house/test_build.py",
    "house/test_documents.py",
    "house/test_examples.py",
    "house/test_extras.py",
    "policies/test_examples.py",
    # vLLM that is not there or not supported; the rest needs vLLM itself
    "vllm/test_import.py",
    # tiers under attack in ways that have no rounds
    "tiers/test_exit.py",
    "tiers/test_fork.py",
    "tiers/test_interrupts.py",
    "tiers/test_planted_links.py",
)

SERVERS = (
    "advise/test_browser.py",
    "tiers/test_lost_epochs.py",
    "tiers/test_many_processes.py",
    "tiers/test_mooncake.py",
    "tiers/test_objects.py",
    "tiers/test_objects_hostile.py",
    "tiers/test_redis.py",
    "tiers/test_remote_chaos.py",
    "tiers/test_remote_forget.py",
    "watch/test_prometheus.py",
)

MARKED = {"fast": FAST, "thorough": THOROUGH, "servers": SERVERS}

LEFT_OUT = ("thorough", "servers", "attack")
"""The marks of what a plain run leaves out."""


def choice_of(config: pytest.Config) -> str:
    """Return which circle a run asks for: ``fast``, ``plain``, or ``all``."""
    if config.option.markexpr == "fast":
        return "fast"
    by_default = config.args_source is not pytest.Config.ArgsSource.ARGS
    return "plain" if by_default and not config.option.markexpr else "all"


def name_of(path: Path) -> str:
    """Return a path below the folder of the tests as the lists write it."""
    tests = ROOT / "tests"
    return path.relative_to(tests).as_posix() if path.is_relative_to(tests) else ""


def is_left_out(path: Path, choice: str) -> bool:
    """Return whether a run need not read a file at all."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    if choice == "fast":
        return name_of(path) not in FAST
    return choice == "plain" and name_of(path) in THOROUGH + SERVERS


def select(items: list[pytest.Item], choice: str) -> list[pytest.Item]:
    """Mark the items that the lists name; return those that a plain run leaves out."""
    for item in items:
        file = name_of(item.path)
        names = {file, f"{file}::{getattr(item, 'originalname', item.name)}"}
        for mark, listed in MARKED.items():
            if not names.isdisjoint(listed):
                item.add_marker(mark)
    if choice != "plain":
        return []
    return [item for item in items if any(map(item.get_closest_marker, LEFT_OUT))]
