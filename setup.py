"""Which extensions are built, with which directives, under which switches; nothing else.

Environment variables, read at build time:

KVOFFLOAD_PURE_PYTHON
    unset or empty: build what can be built, install the pure package where a build fails;
    ``0``: the extensions are required, a failing build is an error;
    any other value: no extension is built.
KVOFFLOAD_DEBUG
    ``1``: assertions, bounds checks and debug symbols.
KVOFFLOAD_SANITIZE
    sanitizers for the C compiler, such as ``address,undefined``.
KVOFFLOAD_LINETRACE
    ``1``: line events for coverage of the .pyx files, and gcov's counters, which see .pxd and .h
    files too.
KVOFFLOAD_PORTABLE
    ``1``: the plain C path that other processors than x86-64 take.

The last four change the generated code: give each of them a checkout of its own.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CHOICE = os.environ.get("KVOFFLOAD_PURE_PYTHON", "")
DEBUG = os.environ.get("KVOFFLOAD_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("KVOFFLOAD_SANITIZE", "")
PORTABLE = os.environ.get("KVOFFLOAD_PORTABLE", "") not in ("", "0")
LINETRACE = os.environ.get("KVOFFLOAD_LINETRACE", "") not in ("", "0")

PURE = CHOICE not in ("", "0")
REQUIRED = CHOICE == "0"
MSVC = sys.platform == "win32"

DIRECTIVES = {
    "language_level": 3,
    "binding": True,  # methods look like functions to inspect, as the Python twins' do
    "embedsignature": False,  # docstrings equal the Python twins'
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
    "linetrace": LINETRACE,
}


def compile_args() -> list[str]:
    """Give the compiler's flags; nothing here ties a wheel to one machine."""
    if MSVC:
        return ["/Od", "/Zi"] if DEBUG else ["/O2", "/fp:precise"]
    # A contracted multiply-add rounds once where Python rounds twice; the twins must agree.
    args = ["-ffp-contract=off"]
    if LINETRACE:
        return [*args, "-O0", "--coverage"]
    args += ["-O1", "-g", "-fno-omit-frame-pointer"] if DEBUG or SANITIZE else ["-O3"]
    if SANITIZE:
        args += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
    return args


def link_args() -> list[str]:
    """Give the linker the runtime of what the compiler put in."""
    if LINETRACE and not MSVC:
        return ["--coverage"]
    return [f"-fsanitize={SANITIZE}"] if SANITIZE else []


def extensions() -> list[Extension]:
    """Make one extension of each .pyx file."""
    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("kvoffload/**/*.pyx"))
    if PURE or not sources:
        return []

    import numpy as np
    from Cython.Build import cythonize

    macros: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
    if DEBUG:
        macros.append(("KVOFFLOAD_DEBUG", "1"))
    if PORTABLE:
        macros.append(("KVOFFLOAD_PORTABLE", "1"))
    if LINETRACE:
        macros += [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")]
    modules = cythonize(
        [
            Extension(
                ".".join(source.with_suffix("").parts),
                [source.as_posix()],
                include_dirs=["kvoffload/_core", np.get_include()],
                define_macros=macros,
                undef_macros=["NDEBUG"] if DEBUG else [],
                extra_compile_args=compile_args(),
                extra_link_args=link_args(),
            )
            for source in sources
        ],
        compiler_directives=DIRECTIVES,
        emit_linenums=LINETRACE,
        force=DEBUG or LINETRACE,
    )
    for module in modules:
        module.optional = not REQUIRED  # cythonize() does not carry the flag over
    return modules


class BuildExtensions(build_ext):
    """Build the extensions, and say so where the package stays pure Python."""

    def finalize_options(self) -> None:
        """Compile on every core unless the command line says otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        """Build all; one line on stderr tells when not every one was built."""
        super().run()
        names = [extension.name for extension in self.extensions or []]
        missing = [name for name in names if not Path(self.get_ext_fullpath(name)).exists()]
        if missing:
            print(
                f"kvoffload: {len(missing)} of {len(names)} extensions were not built; "
                "the package is installed as pure Python",
                file=sys.stderr,
            )


if PURE:
    print("kvoffload: KVOFFLOAD_PURE_PYTHON is set, no extension is built", file=sys.stderr)

setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
