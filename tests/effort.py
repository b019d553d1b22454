"""A pytest plugin that counts what the generated tests really did: ``-p tests.effort``.

Counted are the runs and the steps of state machines, the examples of property tests, the calls made
on both twins and compared, and the comparisons of all that can be seen. The sums of a run are
printed at its end; where ``KVOFFLOAD_TEST_EFFORT`` names a file, one JSON line is added to
it, and ``python -m tests.effort FILE`` prints the sums of all its lines.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from tests.differential.pairs import Pair

FILE_VARIABLE = "KVOFFLOAD_TEST_EFFORT"
EXAMPLES = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing")

done: Counter[str] = Counter()
started = time.monotonic()


COUNTED = (
    (RuleBasedStateMachine, "teardown", "machine runs"),
    (RuleBasedStateMachine, "check_invariants", "machine steps"),  # once after each
    (Pair, "do", "calls compared"),
    (Pair, "agree", "states compared"),
)


def count(owner: type, method: str, name: str) -> None:
    """Count the calls of a method."""
    call = getattr(owner, method)

    def counting(*arguments: Any, **options: Any) -> Any:
        done[name] += 1
        return call(*arguments, **options)

    setattr(owner, method, counting)


def pytest_configure(config: pytest.Config) -> None:
    for owner, method, name in COUNTED:
        count(owner, method, name)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Add what hypothesis says of a property test."""
    for passing, failing in EXAMPLES.findall(getattr(item, "hypothesis_statistics", "")):
        done["examples"] += int(passing) + int(failing)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        done[report.outcome] += 1


def as_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the sums, and keep them where asked to."""
    done["seconds"] = round(time.monotonic() - started)
    terminalreporter.write_line(f"effort: {as_text(done)}")
    file = os.environ.get(FILE_VARIABLE)
    if file:
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(done, sort_keys=True) + "\n")


def main(file: str) -> None:
    """Print the sums of several runs."""
    total: Counter[str] = Counter()
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        total.update({"rounds": 1, **json.loads(line)})
    print(f"effort: {as_text(total)}")


if __name__ == "__main__":
    main(sys.argv[1])
