"""The build of the extensions: directives and switches; and README for an index.

Environment variables, read at build time:

KVOFFLOAD_PURE_PYTHON
    unset or empty: build the extensions; where there is no C compiler, and on Windows, the package
    is pure Python, and its wheel says so in its tag;
    ``0``: build the extensions wherever it is;
    any other value: no extension is built.
    A compiler that fails is an error in every case.
KVOFFLOAD_DEBUG
    ``1``: assertions, bounds checks and debug symbols.
KVOFFLOAD_SANITIZE
    sanitizers for the C compiler, such as ``address,undefined``.
    Under either of these two, tests can have allocations refused.
KVOFFLOAD_PORTABLE
    ``1``: the plain C path that other processors than x86-64 take.

The last four change the generated code: give each of them a checkout of its own.
"""

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).parent
SOURCE = "https://github.com/kvoffload/kvoffload/blob/main"
RAW = "https://raw.githubusercontent.com/kvoffload/kvoffload/main"
CHOICE = os.environ.get("KVOFFLOAD_PURE_PYTHON", "")
DEBUG = os.environ.get("KVOFFLOAD_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("KVOFFLOAD_SANITIZE", "")
PORTABLE = os.environ.get("KVOFFLOAD_PORTABLE", "") not in ("", "0")

CYTHON = "kvoffload._core._cython"
"""What Cython adds for memoryviews, once for all extensions; each with its own took 40 % longer."""

DIRECTIVES = {
    "language_level": 3,
    "binding": True,  # methods look like functions to inspect, as the Python twins' do
    "embedsignature": False,  # docstrings equal the Python twins'
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
}


def reason_for_pure_python() -> str | None:
    """Return why no extension is built, or None if they are."""
    if CHOICE not in ("", "0"):
        return f"KVOFFLOAD_PURE_PYTHON is {CHOICE!r}"
    if CHOICE == "0":
        return None
    if sys.platform == "win32":
        return "the extensions need mmap, which Windows does not have"
    if os.environ.get("CC"):  # asked for: that it is missing is an error of the build
        return None
    # what setuptools' customize_compiler() takes: the compiler that Python was built with
    command = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    return None if shutil.which(command) else f"there is no C compiler: {command} is not found"


def compile_args() -> list[str]:
    """Return the compiler's flags; none ties a wheel to one machine."""
    # A contracted multiply-add rounds once where Python rounds twice; the twins must agree.
    args = ["-ffp-contract=off"]
    # Python passes its own -g on; without debug symbols the compiler takes a fifth less.
    args += ["-O1", "-g", "-fno-omit-frame-pointer"] if DEBUG or SANITIZE else ["-O3", "-g0"]
    if SANITIZE:
        args += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
    return args


def link_args() -> list[str]:
    """Return the linker's flags: the runtime of what the compiler put in."""
    return [f"-fsanitize={SANITIZE}"] if SANITIZE else []


def extensions() -> list[Extension]:
    """Return one extension for each .pyx file, and for each .py file with a .pxd of types."""
    try:
        import numpy as np
        from Cython.Build import cythonize
    except ImportError as error:
        sys.exit(
            f"kvoffload: the extensions cannot be built: {error}; pip install . installs what the "
            "build needs, pip install cython numpy what this command needs; "
            "KVOFFLOAD_PURE_PYTHON=1 installs the Python implementation instead"
        )

    macros: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    if DEBUG:
        macros.append(("KVOFFLOAD_DEBUG", "1"))
    if PORTABLE:
        macros.append(("KVOFFLOAD_PORTABLE", "1"))
    if DEBUG or SANITIZE:  # builds that are for tests only
        macros.append(("KVOFFLOAD_REFUSE_ALLOCATIONS", "1"))
    options: dict[str, Any] = {
        "define_macros": macros,
        "undef_macros": ["NDEBUG"] if DEBUG else [],
        "extra_compile_args": compile_args(),
        "extra_link_args": link_args(),
    }
    sources = sorted(
        path.relative_to(ROOT)
        for path in ROOT.glob("kvoffload/**/*.py*")
        if path.suffix == ".pyx" or (path.suffix == ".py" and path.with_suffix(".pxd").exists())
    )
    include = ["kvoffload/_core", np.get_include()]
    return cythonize(
        [
            Extension(CYTHON, [], **options),
            *(
                Extension(
                    ".".join(source.with_suffix("").parts),
                    [source.as_posix()],
                    include_dirs=include,
                    **options,
                )
                for source in sources
            ),
        ],
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=CYTHON,
        nthreads=os.cpu_count() or 0,
        quiet="--quiet" in sys.argv,
        force=DEBUG,
    )


class BuildExtensions(build_ext):
    """The command that builds the extensions, all of them or none."""

    def finalize_options(self) -> None:
        """Compile on every core unless the command line says otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        """Build all; where one fails, the last line says how to do without."""
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            print(error, file=sys.stderr)
            sys.exit(
                "kvoffload: the extensions cannot be built, see above; "
                "KVOFFLOAD_PURE_PYTHON=1 installs the Python implementation instead"
            )


def readme() -> str:
    """Return README with links and images that work outside the repository, too."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\1{RAW}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{SOURCE}/", text)


# What translates the .pyx files in parallel imports this file.
if __name__ == "__main__":
    if reason := reason_for_pure_python():
        print(f"kvoffload: the package is pure Python: {reason}", file=sys.stderr)

    # Without ext_modules the wheel is tagged py3-none-any.
    setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=[] if reason else extensions(),
        cmdclass={"build_ext": BuildExtensions},
    )
