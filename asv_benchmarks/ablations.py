"""Print how the hit ratio changes without each rule in which a policy departs from its paper.

Each row is a rule and what is done without it; then, for traces and for generated workloads, the
mean change of the block hit ratio over all cells and the lowest, in the cell that loses most. Below
zero, the rule brings hits. A cell is a workload with a capacity in percent of its distinct blocks;
stores complete at once, and nobody gives hints. The Python twins serve the first 300,000 blocks of
each trace of the folder that ``KVOFFLOAD_TRACES`` names. Standard error shows the changes in each
cell, in the order of the rows. Usage::

    python asv_benchmarks/ablations.py [--quick] [--requests N] [TRACE]...
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from ratios import trace_path

from kvoffload import BlockHash
from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.policies import _hit_density_py as twin
from kvoffload.policies import _queue_py, registry
from kvoffload.replay import DecodedTrace
from kvoffload.traces import Trace
from tests.blocks import block_hashes  # `ratios` has made them importable
from tests.policies.stress import WORKLOADS

PERCENTS = (0.5, 1, 2, 5, 10, 20)
# Those that take long are served at fewer sizes.
NAMES = {"mooncake_conversation": PERCENTS, "lmcache_agents_64c": PERCENTS, "weka_cc_a": (1, 5)}
MOST_BLOCKS = 300_000  # of a trace
GENERATED_PERCENTS = (1, 5, 20)
REQUESTS, SEED = 2_000, 1  # of a generated workload
LEAST_CAPACITY = 16  # a request or two
QUICK_NAME, QUICK_PERCENTS = "lmcache_agents_64c", (1, 5)
QUICK_KINDS, QUICK_REQUESTS = ("documents", "chats"), 1_000

Requests = list[list[BlockHash]]


def plain_learned() -> Any:
    """Return the source of ``_learned`` as a module that is not compiled."""
    path = Path(twin.__file__).with_name("_learned.py")
    loader = importlib.machinery.SourceFileLoader("plain_learned", str(path))
    spec = importlib.util.spec_from_loader("plain_learned", loader)
    if spec is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_learned"] = module
    loader.exec_module(module)
    return module


LEARNED = plain_learned()
POLICY: Any = twin.HitDensityCachePolicy
INIT, USE, COMPUTE_ROW = POLICY.__init__, POLICY._use, LEARNED.Learned.compute_row


def next_bin_row(self: Any, reuse_class: int, said: int) -> None:
    """Set each density to that of staying for one bin; nobody gives hints here."""
    del said
    for index in range(1, LEARNED.NUM_BINS):
        chance = self.chances[reuse_class * LEARNED.NUM_BINS + index]
        density = chance / (LEARNED.bin_width(index) * (1.0 - chance / 2.0))
        self.row[index] = density if index == 1 else min(density, self.row[index - 1])


def row_that_may_rise(self: Any, reuse_class: int, said: int) -> None:
    """Compute densities as after the first hint, without the running minimum."""
    with mock.patch.object(self, "is_hinted", True):
        COMPUTE_ROW(self, reuse_class, said)


def one_class_per_use(gap: int, reuse_class: int) -> int:
    """Return the class of a block that is used again: once, or more often."""
    del gap
    return int(LEARNED.class_after(0, reuse_class))


def init_one_clock(self: Any, cache_capacity: int, **options: float) -> None:
    """Let all ghosts share one clock."""
    INIT(self, cache_capacity, **options)
    clock = twin._Clock(sum(clock.num_positions for clock in self._clocks))
    self._clocks = (clock, clock)


def init_storing_all(self: Any, cache_capacity: int, **options: float) -> None:
    """Decline nothing, as above a tier."""
    INIT(self, cache_capacity, **options)
    self.set_declining(False)


def link_nothing(self: Any, batch: list[BlockHash]) -> None:
    """Learn no chain."""
    del self, batch


def use_each_alone(self: Any, batch: list[BlockHash], said: int) -> None:
    """Count the use of each block without the known ones behind it."""
    for block_hash in reversed(batch):
        USE(self, [block_hash], said)


@dataclass(frozen=True)
class Rule:
    """A rule of a policy and how to do without it.

    Attributes
    ----------
    name : str
        The rule, and what is done without it.
    changes : tuple of (owner, name, value)
        Attributes of modules and classes that do without it.
    policy, without : str
        Policy strings; `without` "" is the same as `policy`.
    """

    name: str
    changes: tuple[tuple[Any, str, Any], ...] = ()
    policy: str = "hit-density"
    without: str = ""

    def hit_ratio(self, requests: Requests, capacity: int) -> float:
        """Serve requests without the rule; return the block hit ratio."""
        with ExitStack() as changed:
            for owner, name, value in self.changes:
                changed.enter_context(mock.patch.object(owner, name, value))
            return hit_ratio(requests, self.without or self.policy, capacity)


PLAIN = (twin, "Learned", LEARNED.Learned)
RULES = (
    Rule(
        "density over all horizons; of the next bin alone",
        (PLAIN, (LEARNED.Learned, "compute_row", next_bin_row)),
    ),
    Rule(
        "density does not rise with age; it may",
        (PLAIN, (LEARNED.Learned, "compute_row", row_that_may_rise)),
    ),
    Rule("a quarter of adjacent gaps' counts; none", (PLAIN, (LEARNED, "_NEIGHBOUR_SHARE", 0.0))),
    Rule("classes by gap; once and more often", ((twin, "class_after", one_class_per_use),)),
    Rule("class by the blocks behind; by its own uses", ((POLICY, "_use", use_each_alone),)),
    Rule("two clocks of ghosts; one", ((POLICY, "__init__", init_one_clock),)),
    Rule("admission; everything enters", ((POLICY, "__init__", init_storing_all),)),
    Rule("the oldest leaves within 1.25; the sparsest", ((twin, "_NEARLY", 1.0),)),
    Rule("the guard; none", without="hit-density?guard=0"),
    Rule("4 visits of the hand per block; 1", ((twin, "_VISITS", 1),)),
    Rule("4 visits of the hand per block; 16", ((twin, "_VISITS", 16),)),
    Rule(
        "S3-FIFO's chains; each block alone",
        ((_queue_py.S3FIFOCachePolicy, "_link", link_nothing),),
        policy="s3fifo",
    ),
    Rule("ARC as vLLM has it; as published", policy="arc", without="arc-classic"),
)


def hit_ratio(requests: Requests, policy: str, capacity: int) -> float:
    """Serve requests to an empty cache of a Python twin; return the block hit ratio."""
    with secrets_from(REPEATABLE):
        cache = registry.parse(policy).new_miniature("py", capacity)
    for position, batch in enumerate(requests):
        cache.serve(batch, 0, len(batch), None, position=position, before=position)
    return int(cache.hits) / sum(map(len, requests))


def beginning(name: str) -> Requests:
    """Read the first requests of a trace."""
    trace = DecodedTrace.of(Trace(trace_path(name)))
    keys = trace.keys()
    requests: Requests = []
    num_blocks = 0
    for row in trace.rows():
        num_blocks += len(row)
        if num_blocks > MOST_BLOCKS:
            break
        requests.append([keys[number] for number in row])
    return requests


def cells(requests: Requests, percents: tuple[float, ...]) -> Iterator[tuple[float, int]]:
    """Yield the sizes in percent of the distinct blocks, and in blocks."""
    unique = len({block_hash for batch in requests for block_hash in batch})
    for percent in percents:
        capacity = int(unique * percent / 100)
        if capacity >= LEAST_CAPACITY:
            yield percent, capacity


def changes_without(requests: Requests, capacity: int) -> dict[str, float]:
    """Return the change of the hit ratio without each rule."""
    ratios = {
        policy: hit_ratio(requests, policy, capacity)
        for policy in dict.fromkeys(rule.policy for rule in RULES)
    }
    return {rule.name: rule.hit_ratio(requests, capacity) - ratios[rule.policy] for rule in RULES}


def workloads(chosen: argparse.Namespace) -> Iterator[tuple[str, str, Requests, tuple[float, ...]]]:
    """Yield the group, name, requests and sizes of each workload."""
    names = chosen.traces or ([QUICK_NAME] if chosen.quick else NAMES)
    for name in names:
        percents = QUICK_PERCENTS if chosen.quick else NAMES.get(name, PERCENTS)
        yield "real", Path(name).name, beginning(name), percents
    for name in QUICK_KINDS if chosen.quick else WORKLOADS:
        generate: Any = WORKLOADS[name]
        requests = [block_hashes(*batch) for batch in generate(SEED, chosen.requests)]
        yield "generated", name, requests, QUICK_PERCENTS if chosen.quick else GENERATED_PERCENTS


def figures(changes: list[float]) -> str:
    """Return the mean and the lowest change."""
    if not changes:
        return "none"
    return f"{statistics.mean(changes):+.4f}, {min(changes):+.4f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, a trace, two kinds")
    parser.add_argument("--requests", type=int, help="of each generated workload")
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    chosen = parser.parse_args()
    if chosen.requests is None:
        chosen.requests = QUICK_REQUESTS if chosen.quick else REQUESTS
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group, name, requests, percents in workloads(chosen):
        for percent, capacity in cells(requests, percents):
            changes = changes_without(requests, capacity)
            print(
                f"{name}, {percent:g} %",
                *map("{:+.4f}".format, changes.values()),
                file=sys.stderr,
                flush=True,
            )
            for rule_name, change in changes.items():
                found[group, rule_name].append(change)
    print("| rule; without it | real: mean, worst | generated: mean, worst |")
    print("|---|---|---|")
    for rule in RULES:
        columns = [figures(found[group, rule.name]) for group in ("real", "generated")]
        print("|", " | ".join([rule.name, *columns]), "|")


if __name__ == "__main__":
    main()
