"""All tests on every Python, and on the oldest numpy: ``nox``, or ``nox -s tests-3.10``.

``KVOFFLOAD_PURE_PYTHON`` acts as everywhere: ``0`` requires the extensions, ``1`` leaves them out.
"""

import os
import shutil
import time
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
GENERATED = [f"tests/{name}" for name in ("contract", "differential", "policies", "traces", "fuzz")]
GENERATED += [
    "tests/watch/test_twins.py",
    "tests/tiers/test_machine.py",
    "tests/tiers/test_tiered_store.py",
]


def install_and_test(session: nox.Session, *packages: str) -> None:
    """Build in place, as a contributor does; extensions of several Pythons stand side by side."""
    session.install("-e", ".[test,plot,servers]", *packages)
    session.run("python", "-m", "pytest", "-q", *(session.posargs or ["tests"]))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests on one Python."""
    install_and_test(session)


@nox.session(python="3.10")
def oldest_numpy(session: nox.Session) -> None:
    """Run the tests on the oldest numpy that the metadata allows."""
    install_and_test(session, "numpy==1.24.*")


@nox.session(python="3.11")
def soak(session: nox.Session) -> None:
    """Repeat the generated tests, each round under a new seed: ``nox -s soak -- MINUTES`` (60).

    ``KVOFFLOAD_TEST_BUDGET`` is the budget of a round, by default 2.5 times that of a plain run.
    """
    tree = copy_of_head(session)
    session.install("-e", f"{tree}[test]")
    minutes = float(session.posargs[0]) if session.posargs else 60.0
    effort = Path(session.create_tmp(), f"effort-{time.time_ns()}.jsonl").resolve()
    options = {
        "KVOFFLOAD_TEST_BUDGET": os.environ.get("KVOFFLOAD_TEST_BUDGET", "2.5"),
        "KVOFFLOAD_TEST_EFFORT": str(effort),
    }
    session.chdir(tree)
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        often = ["-o", "faulthandler_timeout=3600"]  # a test may take long
        command = ["python", "-m", "pytest", "-q", "-p", "tests.effort", *often, *GENERATED]
        session.run(*command, env=options)
    session.run("python", "-m", "tests.effort", str(effort))


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """Fuzz the manager and all that reads foreign bytes: ``nox -s fuzz -- MINUTES`` (10) each.

    Needs clang. What is found lies in the session's temporary folder, as does the grown corpus.
    """
    minutes = float(session.posargs[0]) if session.posargs else 10.0
    tree, found = copy_of_head(session), Path(session.create_tmp(), "found").resolve()
    clang = {"CC": "clang", "LDSHARED": "clang -shared"}
    session.install("-e", f"{tree}[test,build]", "atheris")
    session.chdir(tree)
    sanitize = {"KVOFFLOAD_SANITIZE": "address,fuzzer-no-link", "KVOFFLOAD_PURE_PYTHON": "0"}
    session.run("python", "setup.py", "build_ext", "--inplace", "--force", env=clang | sanitize)
    atheris = session.run("python", "-c", "import atheris; print(atheris.path())", silent=True)
    options = {
        "LD_PRELOAD": f"{str(atheris).strip()}/asan_with_fuzzer.so",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    for target in ("calls", "traces", "merge", "slab", "config"):
        corpus = found / target
        corpus.mkdir(parents=True, exist_ok=True)
        command = ["python", "-m", "tests.fuzz", target, f"-max_total_time={60 * minutes:.0f}"]
        session.run(*command, f"-artifact_prefix={found}/", str(corpus), env=options)


@nox.session(python="3.11")
def coverage(session: nox.Session) -> None:
    """Measure the lines of both twins that the tests run; ``.pxd`` and ``.h`` through gcov."""
    tree = copy_of_head(session)
    switches = {"KVOFFLOAD_LINETRACE": "1", "KVOFFLOAD_PURE_PYTHON": "0"}
    session.install("-e", f"{tree}[test,build]")
    session.chdir(tree)
    session.run("python", "setup.py", "build_ext", "--inplace", "--force", env=switches)
    settings = "--rcfile=.ci/coverage.toml"
    # whole traces take too long line by line
    options = {"KVOFFLOAD_TRACES": ""}
    options["KVOFFLOAD_TEST_BUDGET"] = os.environ.get("KVOFFLOAD_TEST_BUDGET", "0.25")
    tests = ["tests/contract", "tests/differential", "tests/policies", "tests/fuzz"]
    tests += ["tests/watch/test_twins.py", "tests/watch/test_watch.py"]
    tests += ["tests/traces/test_recorder.py", "tests/traces/test_request_lines.py"]
    # an exception that a signal's handler raises inside the tracer leaves its lock taken for ever
    tests += ["--ignore=tests/contract/test_signals.py"]
    # line events crash where many threads begin at once, and keep the recorder's from writing in
    # time; a limit on files ends gcov's counters, too
    recorder = ("threads_may_record_at_once", "killed_process", "limit_on_the_size_of_files")
    tests += ["-k", f"not ({' or '.join(recorder)})"]
    run = ["coverage", "run", settings, "-m", "pytest", "-q", "-n", "auto"]
    run += ["-o", "faulthandler_timeout=3600"]
    session.run(*run, *tests, env=options)
    session.run("coverage", "combine", settings)
    session.run("coverage", "report", settings)
    session.run("python", ".ci/gcov_lines.py", "build")


def copy_of_head(session: nox.Session) -> Path:
    """Return a clean clone, for a build that would disturb the one at hand."""
    tree = Path(session.create_tmp(), "tree").resolve()
    shutil.rmtree(tree, ignore_errors=True)
    session.run("git", "clone", "--quiet", ".", str(tree), external=True)
    return tree
