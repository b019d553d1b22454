"""Every check of the project: ``nox -l`` lists them, ``nox -s NAME`` and ``nox -t JOB`` run them.

Each change passes eight jobs, which are tags: ``readme``, ``lint``, ``tests``, ``sanitizers``,
``packages``, ``tiers``, ``vllm`` and ``engine``. Sessions with the tag ``nightly`` take longer, or
need several Pythons or releases of vLLM. Those with the tag ``beside`` wait, or keep one core busy:
`.ci/run` runs them beside the others. A session with two names makes more rounds, or has more
tests, under the nightly one.

Sessions use the environment of nox: ``pip install -e '.[dev]'``, built in place. All other builds
happen in clones of the committed tree. ``KVO_WORK`` is the folder of clones and logs, ``KVO_SEED``
the seed of random tests, which `.ci/run` draws for nightly sessions. A line ``result: …`` goes into
its summary.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
JOBS = ("readme", "lint", "tests", "sanitizers", "packages", "tiers", "vllm", "engine")
nox.options.tags = [*JOBS]

ROOT = Path(__file__).resolve().parent
WORK = Path(os.environ.get("KVO_WORK") or ROOT / ".nox" / "work").resolve()
LOGS = WORK / "logs"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
VLLM = ("0.33.0", "0.32.0", "0.31.0")
"""The supported releases of vLLM, the newest first."""

SEED = os.environ.get("KVO_SEED")
"""The seed of random tests; without it that of `tests/conftest.py`, the same in every run."""

TOOLS = Path(sys.executable).parent
if sys.prefix != sys.base_prefix:  # `.venv/bin/nox` finds the tools beside it, too
    os.environ["PATH"] = os.pathsep.join([str(TOOLS), os.environ["PATH"]])
if SEED:
    os.environ.setdefault("KVOFFLOAD_VLLM_SEED", SEED)

BASH = ("bash", "-euo", "pipefail", "-c")
PYTEST = ("python", "-m", "pytest", "-q", "-n", "auto")
COMPILED = {"KVOFFLOAD_PURE_PYTHON": "0"}
NO_TRACES = {"KVOFFLOAD_TRACES": str(WORK / "no-traces")}  # other sessions replay whole traces
TWINS = [f"tests/{name}" for name in ("contract", "differential", "policies", "traces", "fuzz")]
LONG_TEST = ("-o", "faulthandler_timeout=3600")
ATTACK = (*PYTEST, "-o", "faulthandler_timeout=900", "-rPs")
NOTHING = "(?!)"  # no reason to skip a test
NOT_OF_BUILD = "^(?!.*can refuse allocations)"  # any but that the build cannot
Check = Callable[[nox.Session], None]


def check(*tags: str, name: str | None = None, **options: Any) -> Callable[[Check], Check]:
    """Return the decorator of a session that belongs to these jobs."""
    options.setdefault("venv_backend", "none")

    def register(function: Check) -> Check:
        nox.session(function, name=name, tags=list(tags), **options)
        return function

    return register


# Shared by the sessions.


def output(session: nox.Session, *command: str | Path, **options: Any) -> str:
    """Run a command, print its standard output, and return it."""
    options.setdefault("stderr", None)
    text = str(session.run(*map(str, command), silent=True, **options))
    print(text, end="", flush=True)
    return text


def report(*parts: object) -> None:
    """Print a line for the summary."""
    print("\nresult:", *parts, flush=True)  # the last print may lack the end of its line


def budget(factor: float) -> dict[str, str]:
    """Return the variable that scales generated tests, unless the caller has set it."""
    return {"KVOFFLOAD_TEST_BUDGET": os.environ.get("KVOFFLOAD_TEST_BUDGET") or str(factor)}


def bare(**variables: str) -> dict[str, Any]:
    """Return options to run a command as under `env -i`: only with HOME, PATH and these variables.

    pip keeps its own variables, proxies and certificates, to reach an index.
    """
    pip = "PIP_.*|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    kept = {name: value for name, value in os.environ.items() if re.fullmatch(pip, name.upper())}
    own = str(TOOLS) if sys.prefix != sys.base_prefix else None
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != own)
    env = {**kept, "HOME": os.environ.get("HOME", "/"), "PATH": path, **variables}
    return {"env": env, "include_outer_env": False}


def python_alone() -> str:
    """Return a folder for PATH that has `python3` and no other program, notably no compiler."""
    folder = WORK / "python-alone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "python3").unlink(missing_ok=True)
    (folder / "python3").symlink_to(Path(sys.executable).resolve())
    return str(folder)


def fresh_folder(name: str) -> Path:
    """Return an empty folder."""
    path = WORK / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def fresh_clone(name: str) -> Path:
    """Return a clean clone of the committed tree."""
    path = fresh_folder(name)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(path)], check=True)
    return path


def fresh_venv(name: str) -> Path:
    """Return an empty virtual environment."""
    path = fresh_folder(name)
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    return path


def implementation(session: nox.Session, venv: Path) -> str:
    """Return the name of an environment's implementation."""
    program = "import kvoffload; print(kvoffload.IMPLEMENTATION)"
    return output(session, venv / "bin" / "python", "-I", "-c", program, **bare()).strip()


def build(session: nox.Session, python: str = "python", **variables: str) -> None:
    """Build the extensions in place."""
    command = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    session.run(*command, env=COMPILED | variables)


def variant(session: nox.Session, name: str, **switches: str) -> dict[str, str]:
    """Build a clone in place with switches of the build; change to it.

    Return the variables that put it before the package of the environment.
    """
    session.chdir(fresh_clone(name))
    build(session, **switches)
    return COMPILED | {"PYTHONPATH": str(WORK / name)}


def pure_clone(session: nox.Session) -> dict[str, str]:
    """Change to a clone without extensions; return the variables that put it first."""
    session.chdir(fresh_clone("pure"))
    return {"PYTHONPATH": str(WORK / "pure"), "KVOFFLOAD_PURE_PYTHON": "1"}


def quick_start(number: int) -> str:
    """Return a line of README's quick start."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^## Quick start$.*?^```sh$\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    line = block.splitlines()[number - 1]
    print(line, flush=True)
    return str(line)


def debian(session: nox.Session, command: str, *packages: str) -> bool:
    """Return whether a command exists, after installing Debian's packages if need be."""
    install = (
        "test $(id -u) = 0 && exec 9>$0 && flock 9 && apt-get update -q &&"
        ' DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"'
    )
    if not shutil.which(command):
        WORK.mkdir(parents=True, exist_ok=True)
        lock = str(WORK / "apt.lock")
        session.run("bash", "-c", install, lock, *packages, success_codes=range(256))
    return shutil.which(command) is not None


def cases(path: Path, *kinds: str) -> list[tuple[str, str]]:
    """Return the name and the message of each test of a report that ended in one of these ways."""
    return [
        (f"{case.get('classname')}::{case.get('name')}", f"{end.get('message')} {end.text or ''}")
        for case in ET.parse(path).iter("testcase")
        for kind in kinds
        for end in case.findall(kind)
        if end.get("type") != "pytest.xfail"
    ]


def run_tests(
    session: nox.Session, *command: str, name: str = "", may_skip: str = "", **environment: Any
) -> None:
    """Run pytest; run the failed tests once more by themselves, with the same seed.

    A fault fails again. A test that failed only on a busy machine passes, and the result says so.
    A test that is skipped for a reason without the pattern `may_skip` is an error.
    """
    name = name or session.name
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{name}.xml"
    path.unlink(missing_ok=True)
    options = ["-o", f"cache_dir={fresh_folder(f'pytest-cache/{name}')}"]
    options += [f"--hypothesis-seed={SEED}"] if SEED else []
    start, failed = time.monotonic(), []
    try:
        session.run(*command, *options, f"--junitxml={path}", **environment)
    except CommandFailed:
        if not path.exists():
            raise
        failed = cases(path, "failure", "error")
        print("what failed, once more:", flush=True)
        again = ["--last-failed", "--last-failed-no-failures=none"]
        session.run(*command, *options, *again, **environment)
    for test, _ in failed:
        print("failed, then passed:", test, flush=True)
    total = sum(int(suite.get("tests", 0)) for suite in ET.parse(path).iter("testsuite"))
    skipped = [message for _, message in cases(path, "skipped")]
    counts = [f"{total - len(skipped)} passed", f"{len(skipped)} skipped"]
    if failed:
        counts.append(f"{len(failed)} failed once")
    report(f"{name}: {', '.join(counts)} in {time.monotonic() - start:.0f} s")
    if wrongly := [reason for reason in skipped if not re.search(may_skip, reason)]:
        session.error(f"tests were skipped: {wrongly}")


# README, as a reader types it.


@check("readme")
def readme(session: nox.Session) -> None:
    """README's two lines on a fresh clone, in an empty environment without traces.

    Then the command, its tests and those of traces, under variables that change what is printed.
    """
    session.chdir(fresh_clone("readme"))
    assert "lru" in output(session, *BASH, quick_start(1), **bare())
    assert implementation(session, Path(".venv")) == "compiled"
    line = quick_start(2)
    run_tests(session, *BASH, f'{line} "$@"', "bash", **bare())
    assert implementation(session, Path(".venv")) == "compiled"

    hostile = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "20", "LC_ALL": "C"}
    traces = os.environ.get("KVOFFLOAD_TRACES", "")
    options = bare(**hostile, TERM="dumb", KVOFFLOAD_TRACES=traces, **budget(0.25))
    assert "lru" in output(session, *quick_start(1).split(" && ")[-1].split(), **options)
    files = ("cli", "replay/test_golden.py", "policies/test_golden.py", "watch/test_golden.py")
    files += ("traces/test_merged.py", "traces/test_writer.py")
    chosen = ["-m", "not thorough and not nightly", *(f"tests/{name}" for name in files)]
    run_tests(session, *line.split(" && ")[-1].split(), *chosen, name="readme-hostile", **options)


@check("readme")
@check("nightly", name="readme_rebuilt")
def readme_no_compiler(session: nox.Session) -> None:
    """README's lines without a compiler; nightly the command that the first prints, with one."""
    session.chdir(fresh_clone(session.name))
    bash = (str(shutil.which("bash")), *BASH[1:])
    only_python = bare(PATH=python_alone())
    printed = output(session, *bash, quick_start(1), stderr=subprocess.STDOUT, **only_python)
    assert "lru" in printed
    assert printed.count("running in Python") == 1
    (line,) = re.findall(r"then run: (.*); KVOFFLOAD_PURE_PYTHON=1 ", printed)
    session.run(*bash, quick_start(2).rpartition(" && ")[0], **only_python)
    assert implementation(session, Path(".venv")) == "python"
    if session.name == "readme_rebuilt":
        session.run(*BASH, line, **bare())
        assert implementation(session, Path(".venv")) == "compiled"


# Texts: style, types, documents.


@check("lint")
def style(session: nox.Session) -> None:
    """Lint and format, of Python and of C."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    files = subprocess.check_output(["git", "ls-files", "*.h", "*.c"], text=True).split()
    session.run("clang-format", "--dry-run", "-Werror", *files)


@check("lint")
def types(session: nox.Session) -> None:
    """Types, strictly: of the library, the examples, and each code block of README and docs."""
    checked = output(session, "mypy")
    blocks = output(session, "python", ".ci/typed_blocks.py")
    report(f"{checked.splitlines()[-1]}; {blocks.splitlines()[-1]} of the documents")


@check("lint", "beside")
def docs(session: nox.Session) -> None:
    """The documentation as Read the Docs builds it, without extensions; warnings are errors."""
    session.chdir(fresh_clone("docs"))
    venv = fresh_venv("docs-venv")
    text = Path(".readthedocs.yaml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    install:.*\n +- (.*)$", text, re.MULTILINE)
    session.run(*BASH, line, **bare(PATH=f"{venv}/bin:{bare()['env']['PATH']}"))
    session.chdir("docs")  # so that the installed package is documented
    for form in ("html", "singlehtml"):  # `formats: [htmlzip]` packs the second one
        sphinx = [str(venv / "bin" / "python"), "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
        sphinx += ["-d", str(WORK / "doctrees"), "-b", form, ".", str(WORK / form)]
        session.run(*sphinx, **bare())
    report(len(list((WORK / "html").rglob("*.html"))), "pages")


@check("lint")
def doctests(session: nox.Session) -> None:
    """The examples in the docstrings of the library."""
    ignored = "--ignore=kvoffload/integrations"
    run_tests(session, "python", "-m", "pytest", "-q", "--doctest-modules", ignored, "kvoffload")


# Tests of both twins, and of each.


@check("tests")
def thorough(session: nox.Session) -> None:
    """The tests that README's line leaves out for their length."""
    chosen = ["-m", "thorough and not attack and not nightly", "tests"]
    run_tests(session, *PYTEST, *chosen, env=COMPILED)


@check("tests")
def pure(session: nox.Session) -> None:
    """The tests in a tree without extensions, except those that README's line ran in the same way.

    Tests of the contract and of policies take each Python twin by name.
    """
    env = pure_clone(session) | NO_TRACES | budget(0.25)
    left_out = ("contract", "policies", "house", "advise/test_report.py")
    run_tests(session, *PYTEST, *(f"--ignore=tests/{name}" for name in left_out), env=env)


@check("sanitizers")
@check("nightly", name="sanitizers_everything")
def sanitizers(session: nox.Session) -> None:
    """The compiled twins under AddressSanitizer and UBSan; nightly the long tests, too."""
    env = variant(session, session.name, KVOFFLOAD_SANITIZE="address,undefined")
    names = [f"-print-file-name=lib{name}.so" for name in ("asan", "ubsan")]
    libraries = [output(session, "gcc", name).strip() for name in names]
    # The sanitizers write to file descriptor 2, which --capture=sys does not capture, and end the
    # process. Python's own allocator would hide overruns. Leaks have tests of their own, as the
    # interpreter leaks at exit.
    env |= {
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": " ".join(libraries),
        **NO_TRACES,
        **budget(0.1 if session.name == "sanitizers" else 1),
    }
    few = ["-m", "not thorough and not nightly", *TWINS[:2], "tests/fuzz"]
    tests = ["--capture=sys", "-k", "not python and not reaches"]  # the corpus is read once
    tests += few if session.name == "sanitizers" else TWINS
    tests += ["--ignore=tests/traces/test_bounds.py"]  # what is freed takes memory for a while
    run_tests(session, *PYTEST, *tests, may_skip=NOT_OF_BUILD, env=env)


@check("sanitizers", "beside")
def instructions(session: nox.Session) -> None:
    """No hot path takes 3 % more instructions than at the parent commit, or ``KVO_BASE``.

    ``KVO_TOLERANCE=0.10`` allows more: the commit message says why.
    """
    if not debian(session, "valgrind", "valgrind", "libc6-dbg"):
        session.skip("valgrind is missing and cannot be installed")
    asked = f"{os.environ.get('KVO_BASE', 'HEAD~1')}^{{commit}}"
    base = output(session, "git", "rev-parse", "--verify", asked).strip()
    sources = ["setup.py", "kvoffload/*.pyx", "kvoffload/*.pxd", "kvoffload/*.h"]
    compiled = (path.with_suffix(".py") for path in ROOT.glob("kvoffload/**/*.pxd"))
    sources += [str(path) for path in compiled if path.exists()]
    if not subprocess.check_output(["git", "diff", "--name-only", base, "HEAD", "--", *sources]):
        return report("compiled sources as in", base[:7])
    tree = fresh_clone("base")
    session.chdir(tree)
    session.run("git", "checkout", "--quiet", base)
    build(session)
    return session.run("python", str(ROOT / ".ci" / "instructions.py"), str(ROOT), ".")


# Packages.

WHEEL = ("-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--wheel-dir")


def check_wheel(session: nox.Session, wheel: Path, expected: str) -> None:
    """Fail unless a wheel has every file of the package, and extensions in the place of sources."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    listed = subprocess.check_output(["git", "ls-files", "kvoffload"], cwd=ROOT, text=True)
    files = {Path(line) for line in listed.splitlines()}
    pyx, py, pxd = (
        {path.with_suffix("") for path in files if path.suffix == suffix}
        for suffix in (".pyx", ".py", ".pxd")
    )
    wanted = {path for path in files if path.suffix not in {".pyx", ".pxd", ".h", ".c"}}
    if expected == "compiled":
        wanted |= pyx | (py & pxd) | {Path("kvoffload/_core/_cython")}  # see CYTHON in setup.py
    libraries = {path for path in names if path.suffix in {".so", ".pyd"}}
    found = names - libraries | {path.with_name(path.name.split(".")[0]) for path in libraries}
    if found != wanted:
        session.error(f"missing: {wanted - found}; not for a wheel: {found - wanted}")


def try_wheel(session: nox.Session, wheel: Path, expected: str) -> None:
    """Run the first steps of a wheel's user, in an empty environment."""
    check_wheel(session, wheel, expected)
    venv = fresh_venv(f"packages-{wheel.parent.name}")
    session.run(str(venv / "bin" / "python"), "-m", "pip", "install", str(wheel))
    assert implementation(session, venv) == expected
    with session.chdir(venv):
        # without the extra: one line names the command that installs it
        command = ["bin/kvoffload", "--version"]
        line = output(session, *command, stderr=subprocess.STDOUT, success_codes=[2], **bare())
        (hint,) = re.findall(r"^.* needs [a-z]*: (.*)\n\Z", line)
        session.run(*BASH, hint, **bare())
        session.run(*command, **bare())
        replay = "bin/kvoffload replay --limit 200 --policy lru,arc --json 2>errors"
        json.loads(output(session, *BASH, replay, **bare()))
        lines = Path("errors").read_text(encoding="utf-8").splitlines()
    assert len(lines) == (expected == "python"), lines  # a line says that it runs in Python
    if expected == "compiled":  # both show the same types
        check_types(session, venv)


def check_types(session: nox.Session, venv: Path) -> None:
    """Check README's program with mypy and pyright as in a user's editor; they find its types."""
    program = "from pathlib import Path; from typed_blocks import module; "
    program += "print(module(Path('README.md')))"
    text = output(session, "python", "-c", program, env={"PYTHONPATH": ".ci"})
    assert "\nfrom kvoffload import" in f"\n{text}"
    python = str(venv / "bin" / "python")
    checkers = [["mypy", "--strict", "--python-executable", python]]
    # the package of pyright fetches it from npm's registry, and needs node
    pyright = shutil.which("node") and subprocess.run(["pyright", "--version"], check=False)
    if pyright and not pyright.returncode:
        checkers.append(["pyright", "--pythonpath", python])
    with session.chdir(venv):  # not in the sources
        Path("right.py").write_text(text, encoding="utf-8")
        Path("wrong.py").write_text(f"{text}manager.lookup(16)\n", encoding="utf-8")
        for checker in checkers:
            session.run(*checker, "right.py")
            session.run(*checker, "wrong.py", success_codes=[1])
    report("types as seen by", " and ".join(command[0] for command in checkers))


@check("packages", "beside")
def packages(session: nox.Session) -> None:
    """An sdist, and wheels from it with a compiler and without one."""
    tree, dist = fresh_clone("packages"), fresh_folder("dist")
    session.run("python", "-m", "build", "--sdist", "--outdir", str(dist), str(tree), silent=True)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = ["git", "ls-files", "kvoffload/*", ":(glob)[!.]*"]  # and the files beside the package
    missing = set(subprocess.check_output(listed, text=True).split()) - held
    built = [name for name in held if fnmatch(name, "kvoffload/*") and name.endswith((".c", ".so"))]
    assert not missing, f"not in the sdist: {missing}"
    assert not built, f"built files in the sdist: {built}"

    def make(name: str, **options: Any) -> Path:
        session.run(TOOLS / "python", *WHEEL, dist / name, sdist, **options)
        return next((dist / name).glob("*.whl"))

    wheel = make("compiler")
    try_wheel(session, wheel, "compiled")
    if shutil.which("auditwheel"):
        session.run("auditwheel", "show", str(wheel))  # the systems that it would run on
    pure_wheel = make("no-compiler", env={"PATH": python_alone()})
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    try_wheel(session, pure_wheel, "python")
    report(f"{wheel.name}, {wheel.stat().st_size // 1024} KiB")


# Tiers, the watch and the report, on real servers and in a browser.


@check("tiers")
@check("nightly", name="attacks")
def tiers(session: nox.Session) -> None:
    """Tiers under attack, a quarter of the stated rounds; the native threads under sanitizers.

    Nightly all rounds that the documentation states.
    """
    native = ["-m", "attack", "tests/tiers/test_native.py"]
    all_rounds = COMPILED | {"KVOFFLOAD_TEST_BUDGET": "20"}  # fewer leave the sanitizers out
    run_tests(session, *PYTEST, *native, name=f"{session.name}-native", env=all_rounds)
    debian(session, "fuse2fs", "fuse2fs")  # without it, tests that need it are skipped and say so
    env = COMPILED | budget(5 if session.name == "tiers" else 20)
    run_tests(session, *ATTACK, "-m", "attack and not servers", "tests/tiers", env=env)


@check("tiers", "beside")
@check("nightly", name="remote_attacks")
def remote_tiers(session: nox.Session) -> None:
    """Tiers on servers that are killed, stopped, slow, full and hostile: a quarter of the rounds.

    Nightly all. Debian's redis-server; moto's server, which stands in for S3; a shared directory.
    """
    for command in ("redis-server", "openssl", "fuse2fs"):
        debian(session, command, command)
    names = ("conformance", "remote_parts", "resources", "objects_hostile")
    names += ("remote_chaos", "generation", "many_processes")
    files = [f"tests/tiers/test_{name}.py" for name in names]
    env = COMPILED | budget(5 if session.name == "remote_tiers" else 20)
    run_tests(session, *ATTACK, *files, may_skip="fuse2fs", env=env)


@check("tiers", "beside")
def watch(session: nox.Session) -> None:
    """A real Prometheus scrapes a replay: each expression of dashboard and rules returns data."""
    if not all(debian(session, name, "prometheus") for name in ("prometheus", "promtool")):
        session.skip("prometheus is missing and cannot be installed")
    run_tests(session, *PYTEST[:4], "tests/watch/test_prometheus.py", may_skip=NOTHING)


@check("tiers", "beside")
def browser(session: nox.Session) -> None:
    """The report of ``kvoffload advise`` in a real browser, Debian's chromium."""
    packages = ("chromium", "chromium-driver")
    if not all(debian(session, name, *packages) for name in ("chromium", "chromedriver")):
        session.skip("chromium is missing and cannot be installed")
    run_tests(session, *PYTEST[:4], "tests/advise/test_browser.py", may_skip=NOTHING)


# Engines: vLLM, SGLang and LMCache, in environments that are kept outside the checkout.


def engine_python(session: nox.Session, *command: str) -> str:
    """Return the Python of an engine's environment; build the tree in place, unless CI has."""
    python = output(session, *command).strip()
    ask = "from importlib.machinery import EXTENSION_SUFFIXES as names; print(names[0])"
    suffix = output(session, python, "-c", ask).strip()
    # sessions beside this one load what `.ci/run` has built: a build would write all of it anew
    if "KVO_VENV" not in os.environ or not [*ROOT.glob(f"kvoffload/_core/*{suffix}")]:
        build(session, python)
    return python


@check("vllm", "beside")
@check("nightly", "beside", name="vllm_everything")
def vllm(session: nox.Session) -> None:
    """The newest vLLM; the two releases before it: decisions, hints, transfers, interface.

    Nightly all tests of each release, in longer random sequences, and refused allocations.

    ``nox -s vllm -- VERSION`` tests that release. Of an unsupported one it names the differences
    from the interface of each supported one, and writes the file in
    ``kvoffload/integrations/vllm/interfaces`` that supports it. If the tests pass, that file is all
    that the release needs.
    """
    nightly = session.name == "vllm_everything"
    names = ("differential", "session_ends", "interface", "construction", "scheduler")
    older = [f"tests/vllm/test_{name}.py" for name in names]
    env = COMPILED | {"KVOFFLOAD_VLLM_SEQUENCES": "750" if nightly else "100"}
    releases = session.posargs or VLLM
    for version in releases:
        python = engine_python(session, ".ci/vllm-env", version)
        if version not in VLLM:
            session.run(python, ".ci/interface.py", "vllm")
        chosen = ["--continue-on-collection-errors", "-m", "" if nightly else "not nightly"]
        chosen += ["tests/vllm"] if nightly or version not in VLLM[1:] else older
        seeded = [("3", chosen), ("1", ["tests/vllm/test_scheduler.py"])]
        if not nightly and not session.posargs:  # each seed with one release at least
            seeded = [seeded[0]] if version == releases[0] else [("1", chosen)]
        for hash_seed, tests in seeded:
            command = [python, "-m", "pytest", "-q", *tests]
            name = f"vllm-{version}-hash-{hash_seed}"
            run_tests(session, *command, name=name, env=env | {"PYTHONHASHSEED": hash_seed})
    if nightly:
        env |= variant(session, "vllm-debug", python=python, KVOFFLOAD_DEBUG="1")
        for version in releases:
            python = output(session, ".ci/vllm-env", version).strip()
            tests = [python, "-m", "pytest", "-q", "-m", "refused_allocations", "tests/vllm"]
            name = f"vllm-{version}-memory"
            run_tests(session, *tests, name=name, may_skip=NOT_OF_BUILD, env=env)


@check("vllm", "beside")
def storages(session: nox.Session) -> None:
    """SGLang's storage side; LMCache's storage manager and server over a slab; both on a CPU."""
    for name in ("sglang", "lmcache"):
        python = engine_python(session, ".ci/engine-env", name)
        tests = [python, "-m", "pytest", "-q", f"tests/{name}"]
        run_tests(session, *tests, name=name, may_skip=NOTHING, env=COMPILED)


@contextmanager
def no_server_left(folder: Path) -> Iterator[None]:
    """End the servers of tests that were killed: while one runs, its process group is in a file."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        for path in folder.rglob("server.pid"):
            with suppress(OSError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)


@check("engine", "beside")
@check("nightly", "beside", name="engine_everything")
def engine(session: nox.Session) -> None:
    """vLLM's newest server on a CPU, asked over HTTP, computes the same tokens, fewer of them.

    Nightly with every policy; the older ones with the tests for every release.
    """
    # Two engines over one Redis server: its client is no part of the engine's environment.
    debian(session, "redis-server", "redis-server")
    import redis

    extra = fresh_folder("engine-packages")
    (extra / "redis").symlink_to(Path(redis.__file__).parent)
    env = COMPILED | {"PYTHONPATH": str(extra)}
    chosen = {VLLM[0]: ["-m", "not nightly"]}
    if session.name == "engine_everything":
        chosen = {version: ["-m", "every_release"] for version in VLLM} | {VLLM[0]: []}
    for version, options in chosen.items():
        python = engine_python(session, ".ci/vllm-env", "--engine", version)
        folder = WORK / f"engine-{version}"
        command = [python, "-m", "pytest", "-q", "--basetemp", str(folder), *options]
        with no_server_left(folder):
            run_tests(session, *command, "tests/engine", name=f"engine-{version}", env=env)


# Nightly, and before a release.


@check("nightly")
def everything(session: nox.Session) -> None:
    """Every test without servers at five times the budget; README's in Python alone."""
    env = COMPILED | budget(5)
    long = ["-o", "faulthandler_timeout=900", "-m", "not servers", "tests"]
    run_tests(session, *PYTEST, *long, env=env)
    env = pure_clone(session) | NO_TRACES | budget(1)
    run_tests(session, *PYTEST, name="everything-pure", env=env)


@check("nightly")
def debug(session: nox.Session) -> None:
    """The compiled twins with assertions, bounds checks and refused allocations."""
    env = variant(session, "debug", KVOFFLOAD_DEBUG="1") | NO_TRACES | budget(0.25)
    options = ["--capture=sys", "-k", "not python", *TWINS, "tests/isolated/test_memory.py"]
    run_tests(session, *PYTEST, *options, may_skip=NOT_OF_BUILD, env=env)


@check("nightly", python=PYTHONS, venv_backend="virtualenv")
@check("nightly", name="oldest_numpy", python=PYTHONS[0], venv_backend="virtualenv")
def pythons(session: nox.Session) -> None:
    """The tests on one of the supported Pythons, or with the oldest numpy that is allowed."""
    session.chdir(fresh_clone(session.name))
    numpy = [] if session.name.startswith("pythons") else ["numpy==1.24.*"]
    session.install("-e", ".[test,plot]", *numpy, env=COMPILED)
    chosen = ["-m", "not servers and not attack", "tests"]
    run_tests(session, *PYTEST, *chosen, env=COMPILED | NO_TRACES)


@check("nightly")
def coverage(session: nox.Session) -> None:
    """The lines of both twins that the tests run; ``.pxd`` and ``.h`` through gcovr."""
    env = variant(session, "coverage", KVOFFLOAD_LINETRACE="1")
    settings = "--rcfile=.ci/coverage.toml"
    # whole traces take too long line by line
    env |= NO_TRACES | budget(0.25)
    tests = [*TWINS[:3], "tests/fuzz", "tests/watch/test_twins.py", "tests/watch/test_watch.py"]
    tests += ["tests/traces/test_recorder.py", "tests/traces/test_request_lines.py"]
    tests += ["tests/replay/test_fleet_index.py"]
    # an exception that a signal's handler raises inside the tracer leaves its lock held forever
    tests += ["--ignore=tests/contract/test_signals.py"]
    tests += ["--ignore=tests/policies/test_hit_density_workloads.py"]  # hours, line by line
    # line events crash if many threads begin at once, and keep the recorder's from writing in
    # time; a limit on files ends gcov's counters, too
    recorder = ("threads_may_record_at_once", "killed_process", "limit_on_the_size_of_files")
    tests += ["-k", f"not ({' or '.join(recorder)})"]
    run = ["python", "-m", "coverage", "run", settings, *PYTEST[1:], *LONG_TEST]
    run_tests(session, *run, *tests, env=env)
    session.run("python", "-m", "coverage", "combine", settings)
    lines = output(session, "python", "-m", "coverage", "report", settings)
    # functions of Cython have names that gcovr takes for the compiler's own
    inline = [r"--filter=kvoffload/.*\.(pxd|h)$", "--include-internal-functions", "--merge-lines"]
    lines += output(session, "gcovr", *inline, "--gcov-ignore-errors=all", "build")
    report(*re.findall("^TOTAL.*", lines, re.MULTILINE))


@check("nightly")
def dockerfile(session: nox.Session) -> None:
    """The lines of examples/Dockerfile, without Docker: each stage in an environment of its own."""
    image, made = fresh_folder("image"), fresh_folder("image-wheels")
    text = (ROOT / "examples" / "Dockerfile").read_text(encoding="utf-8")
    stages = text.replace("/wheels", str(made)).split("\nFROM ")[1:]
    build_path = f"{fresh_venv('build-stage')}/bin:{bare()['env']['PATH']}"
    # of the last stage only the wheels: no compiler, index, settings of pip
    last_path = f"{fresh_venv('last-stage')}/bin:{python_alone()}"
    last = {"HOME": str(image), "PIP_CONFIG_FILE": os.devnull, "PATH": last_path}
    bash = (str(shutil.which("bash")), *BASH[1:])
    for names in re.findall(r"^COPY (?!--from=)(.*) \S+$", stages[0], re.MULTILINE):
        # of the tree as it is after a build in place
        session.run("cp", "-a", *(str(ROOT / name) for name in names.split()), str(image))
    for stage, folder, options in (
        (stages[0], image, bare(PATH=build_path)),
        (stages[1], made, {"env": last, "include_outer_env": False}),  # not in the sources
    ):
        session.chdir(folder)
        for command in re.findall(r"^RUN (.*)$", stage, re.MULTILINE):
            session.run(*bash, command, **options)
    report(len(list(made.glob("*.whl"))), "wheels, installed without a compiler")


@check("nightly", python=PYTHONS, venv_backend="virtualenv")
def wheels(session: nox.Session) -> None:
    """A wheel for one of the supported Pythons: its contents, and a replay without a compiler."""
    tree, dist = fresh_clone(f"{session.name}-source"), fresh_folder(session.name)
    session.run("python", *WHEEL, str(dist), str(tree), env=COMPILED)
    (path,) = dist.glob("*.whl")
    check_wheel(session, path, "compiled")
    session.install(f"kvoffload[cli] @ file://{path}")
    session.chdir(dist)  # the tree has a package of that name
    command = f"{session.bin}/kvoffload"
    env = {"PATH": python_alone()}
    assert "(compiled)" in output(session, command, "--version", env=env)
    replay = ["replay", "--limit", "200", "--policy", "lru,arc", "--json"]
    json.loads(output(session, command, *replay, env=env))
    report(path.name)


@check("nightly", "beside")
def soak(session: nox.Session) -> None:
    """Generated tests, each round under a new seed: ``nox -s soak -- MINUTES`` (30).

    ``KVOFFLOAD_TEST_BUDGET`` is the budget of a round, by default 2.5 times that of a plain run.
    """
    minutes = float(session.posargs[0]) if session.posargs else 30.0
    env, rounds = COMPILED | budget(2.5), 0
    files = ["watch/test_twins.py", "tiers/test_conformance.py", "tiers/test_tiered_store.py"]
    command = ["python", "-m", "pytest", "-q", *LONG_TEST, "--hypothesis-seed=random", *TWINS]
    command += [f"tests/{name}" for name in files]
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        session.run(*command, env=env)
        rounds += 1
    report(rounds, "rounds")


@check("nightly", "beside", venv_backend="venv")
def fuzz(session: nox.Session) -> None:
    """Fuzz the manager and all readers of foreign bytes: ``nox -s fuzz -- MINUTES`` (10) each.

    Needs clang and its runtimes (libclang-rt-14-dev). Findings, grown corpus: KVO_WORK/fuzz.
    """
    if not shutil.which("clang"):
        session.skip("clang is missing")
    minutes = float(session.posargs[0]) if session.posargs else 10.0
    tree, found = fresh_clone("fuzz-tree"), WORK / "fuzz"
    clang = {"CC": "clang", "LDSHARED": "clang -shared"}
    switches = COMPILED | {"KVOFFLOAD_SANITIZE": "address,fuzzer-no-link"}
    session.install("-e", f"{tree}[test,build]", "atheris", env=clang | switches)
    session.chdir(tree)
    atheris = output(session, "python", "-c", "import atheris; print(atheris.path())")
    options = {
        "LD_PRELOAD": f"{atheris.strip()}/asan_with_fuzzer.so",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    for target in ("calls", "traces", "prompts", "merge", "slab", "config", "options"):
        corpus = found / target
        corpus.mkdir(parents=True, exist_ok=True)
        command = ["python", "-m", "tests.fuzz", target, f"-max_total_time={60 * minutes:.0f}"]
        session.run(*command, f"-artifact_prefix={found}/", str(corpus), env=options)


@check("nightly", "beside")
def benchmarks(session: nox.Session) -> None:
    """Every benchmark runs once, and a fresh clone publishes the results of all releases."""
    session.chdir("asv_benchmarks")
    env = {"HOME": str(fresh_folder("asv")), **COMPILED}  # HOME is where asv notes the machine
    session.run("asv", "machine", "--yes", env=env, silent=True)
    session.run("asv", "check", "--python=same", env=env)
    run = ["asv", "run", "--quick", "--dry-run", "--show-stderr", "--python=same"]
    printed = output(session, *run, env=env)
    ends = re.findall(r"^\[.*\.(?:time|track|peakmem)[a-z]*_.*", printed, re.MULTILINE)
    failed = [line for line in ends if line.endswith("failed")]
    if not ends or failed:
        session.error("\n".join(["failed:", *failed]))
    tree = fresh_clone("benchmarks")
    session.chdir(tree / "asv_benchmarks")
    session.run("python", "history.py")  # fails if a release has no results
    session.run("git", "checkout", "--quiet", "-B", "main")
    session.run("asv", "publish", env=env)
    index = json.loads(Path("html/index.json").read_text(encoding="utf-8"))
    if not index["benchmarks"]:
        session.error("no benchmark is published")
    report(len(ends), "benchmarks run,", len(index["benchmarks"]), "published")


@check("nightly", "beside")
def engine_benchmark(session: nox.Session) -> None:
    """The benchmark of a real engine runs, with offloading and without."""
    python = engine_python(session, ".ci/vllm-env", "--engine")
    command = [python, "asv_benchmarks/vllm_engine.py", "--turns", "10"]
    session.run(*command, "--engine", "no offloading", "--engine", "kvoffload, lru", env=COMPILED)
