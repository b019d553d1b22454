"""Fixtures and hooks of all tests: the twins, the budget of generated tests, printed seeds.

``KVOFFLOAD_TEST_BUDGET`` multiplies the number of generated examples (``0.25`` for sanitizer
builds, ``12`` for a soak). ``--hypothesis-profile`` picks ``default``, ``ci`` or ``soak``. Every
run uses the same seed, so that all runs of a commit test the same calls;
``--hypothesis-seed=random`` draws another, and the header prints what repeats the run.

``pytest -m fast`` runs the core of each area, ``pytest`` all but what is long, attacks tiers or
needs servers, and ``pytest PATH`` or any other ``-m`` all that the path or the expression names.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import re
from collections.abc import Iterator
from hashlib import pbkdf2_hmac
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from kvoffload._sampling import REPEATABLE, secrets_from
from kvoffload.traces import prompt_blocks
from tests.allocations import REFUSABLE

TWINS = ("python", "compiled")
BUDGET_VARIABLE = "KVOFFLOAD_TEST_BUDGET"
PROFILES = {"default": (6, 40), "ci": (120, 60), "soak": (2000, 100)}
"""Profile -> examples per test, steps per state machine, before the budget is applied."""

SEED = 139_461_737
"""The seed of a run that is given none."""

LEFT_OUT = ("thorough", "servers", "attack")
"""The marks of the tests that a plain run leaves out."""

MARKS = re.compile(r"^pytestmark = (?:\[.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)
"""The statement that marks all tests of a file."""

SEED_KEY = pytest.StashKey[int]()
CHOICE_KEY = pytest.StashKey[str]()


def read_budget() -> float:
    """Return the factor that the environment puts on generated tests."""
    text = os.environ.get(BUDGET_VARIABLE, "") or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 10_000:
        raise pytest.UsageError(f"{BUDGET_VARIABLE} must be a number in (0, 10000], got {text!r}")
    return factor


def choice_of(config: pytest.Config) -> str:
    """Return which tests a run asks for: ``fast``, ``plain``, or ``all``."""
    if config.option.markexpr == "fast":
        return "fast"
    by_default = config.args_source is not pytest.Config.ArgsSource.ARGS
    return "plain" if by_default and not config.option.markexpr else "all"


def register_profiles(factor: float) -> None:
    """Register the profiles of hypothesis, with the budget applied."""
    for name, (examples, steps) in PROFILES.items():
        settings.register_profile(
            name,
            max_examples=max(1, round(examples * factor)),
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
    settings.load_profile("default")


register_profiles(read_budget())
if hasattr(providers, "_get_local_constants"):
    # Hypothesis also draws constants of all modules imported so far, which differ between workers.
    providers._get_local_constants = lambda: providers._local_constants
for variable in ("no_proxy", "NO_PROXY"):  # the servers of the tests are on this machine
    os.environ[variable] = "127.0.0.1,localhost"
os.environ.pop("FORCE_COLOR", None)  # what is printed is compared without colours


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of this run; workers take the run's, and hash strings by it."""
    given = config.getoption("--hypothesis-seed", default=None) or SEED
    if hasattr(config, "workerinput"):
        given = config.workerinput["seed"]
    elif given == "random":
        given = random.SystemRandom().randrange(2**32)
    seed = config.stash[SEED_KEY] = int(given)
    config.option.hypothesis_seed = str(seed)
    os.environ.setdefault("PYTHONHASHSEED", str(seed % 2**32))
    # a worker is given paths where the run was given none
    worker = getattr(config, "workerinput", None)
    config.stash[CHOICE_KEY] = worker["choice"] if worker else choice_of(config)
    if config.getoption("dist", "no") == "load":  # no process is idle while another has tests left
        config.option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start one process more than there are cores: tests also wait, for servers and clocks."""
    return (os.cpu_count() or 1) + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test draws; skip refused allocations where the build cannot refuse any."""
    random.seed(item.config.stash[SEED_KEY])
    if not REFUSABLE and item.get_closest_marker("refused_allocations"):
        pytest.skip("needs a build that can refuse allocations: KVOFFLOAD_DEBUG=1")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed and the choice of the run."""
    node.workerinput["seed"] = node.config.stash[SEED_KEY]
    node.workerinput["choice"] = node.config.stash[CHOICE_KEY]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unread by Python, whole files that this run has no test of."""
    choice = config.stash[CHOICE_KEY]
    if choice == "all" or not collection_path.match("test_*.py"):
        return None
    marks = MARKS.search(collection_path.read_text(encoding="utf-8"))
    names = set(re.findall(r"pytest\.mark\.(\w+)", marks.group() if marks else ""))
    return ("fast" not in names if choice == "fast" else not names.isdisjoint(LEFT_OUT)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a plain run what is long."""
    if config.stash[CHOICE_KEY] == "plain":
        left_out = [item for item in items if any(map(item.get_closest_marker, LEFT_OUT))]
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


def how_to_repeat(config: pytest.Config) -> str:
    """Return what it takes to repeat this run."""
    seed, budget = config.stash[SEED_KEY], read_budget()
    return f"generated tests: --hypothesis-seed={seed} {BUDGET_VARIABLE}={budget:g}"


def pytest_report_header(config: pytest.Config) -> str:
    """Print which twins are tested and how to repeat this run."""
    return f"kvoffload: {' and '.join(AVAILABLE)}; {how_to_repeat(config)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print how to repeat a run that failed, in quiet runs too, and that tests were skipped."""
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped and "s" not in terminalreporter.reportchars:
        terminalreporter.write_line(f"{skipped} skipped: -rs says why")
    if exitstatus:
        terminalreporter.write_line(how_to_repeat(terminalreporter.config))


def pytest_collection_finish() -> None:
    """Keep what was collected out of later collections of garbage, which tests ask for often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_sample() -> Iterator[None]:
    """Let both twins, and replays, sample the same blocks in every run."""
    with secrets_from(REPEATABLE):
        yield


@pytest.fixture(scope="session", autouse=True)
def _keys_of_salts() -> Iterator[None]:
    """Derive the key of a salt once: it takes 40 ms, and many small logs are read under one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_blocks, "pbkdf2_hmac", functools.cache(pbkdf2_hmac))
        yield


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of this run, for workloads drawn without hypothesis."""
    return request.config.stash[SEED_KEY]


def available_twins() -> list[str]:
    """Return the twins to test.

    Where the compiled ones were not built, only the Python ones, and the header says so; under
    ``KVOFFLOAD_PURE_PYTHON=0``, which demands the compiled ones, both, so that tests fail.
    """
    try:
        importlib.import_module("tests._compiled")
    except ImportError:
        if os.environ.get("KVOFFLOAD_PURE_PYTHON") != "0":
            os.environ["KVOFFLOAD_PURE_PYTHON"] = "1"  # so that no command says so again
            return ["python"]
    return list(TWINS)


AVAILABLE = available_twins()


@pytest.fixture(scope="session", params=AVAILABLE)
def twin(request: pytest.FixtureRequest) -> ModuleType:
    """Return one of the two twins; a test that asks for it runs on both."""
    return importlib.import_module(f"tests._{request.param}")


@pytest.fixture(scope="session")
def twins() -> tuple[ModuleType, ModuleType]:
    """Return the Python and the compiled twin, for tests that compare them."""
    if list(TWINS) != AVAILABLE:
        pytest.skip("the compiled twins are not built")
    return tuple(importlib.import_module(f"tests._{name}") for name in TWINS)  # type: ignore[return-value]
