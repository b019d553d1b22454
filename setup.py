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
KVOFFLOAD_LINETRACE
    ``1``: line events for coverage of the .pyx files, and gcov's counters, which see .pxd and .h
    files too.
    Under any of these three, tests can have allocations refused.
KVOFFLOAD_PORTABLE
    ``1``: the plain C path that other processors than x86-64 take.

The last four change the generated code: give each of them a checkout of its own.

A build in place, which an editable install is too, does nothing where the extensions in place were
built from the same sources, tools and switches; ``--force`` builds anyway.
"""

import hashlib
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
LINETRACE = os.environ.get("KVOFFLOAD_LINETRACE", "") not in ("", "0")

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
    "linetrace": LINETRACE,
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
    if LINETRACE:
        return [*args, "-O0", "--coverage"]
    # Python passes its own -g on; without debug symbols the compiler takes a fifth less, and beside
    # sanitizers, whose stacks need lines only, a third less.
    symbols = "-g" if DEBUG else "-g1" if SANITIZE else "-g0"
    args += ["-O1", "-fno-omit-frame-pointer"] if DEBUG or SANITIZE else ["-O3"]
    args += [symbols]
    if SANITIZE:
        args += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all"]
    return args


def link_args() -> list[str]:
    """Return the linker's flags: the runtime of what the compiler put in."""
    if LINETRACE:
        return ["--coverage"]
    return [f"-fsanitize={SANITIZE}"] if SANITIZE else []


def sources() -> list[Path]:
    """Return what Cython translates: each .pyx file, and each .py file with a .pxd of types."""
    return sorted(
        path
        for path in ROOT.glob("kvoffload/**/*.py*")
        if path.suffix == ".pyx" or (path.suffix == ".py" and path.with_suffix(".pxd").exists())
    )


def extensions() -> list[Extension]:
    """Return one extension for each source, and that of what they share."""
    try:
        import Cython  # noqa: F401
        import numpy as np
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
    if DEBUG or SANITIZE or LINETRACE:  # builds that are for tests only
        macros.append(("KVOFFLOAD_REFUSE_ALLOCATIONS", "1"))
    if LINETRACE:
        macros += [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")]
    options: dict[str, Any] = {
        "define_macros": macros,
        "undef_macros": ["NDEBUG"] if DEBUG else [],
        "extra_compile_args": compile_args(),
        "extra_link_args": link_args(),
    }
    include = ["kvoffload/_core", np.get_include()]
    return [
        Extension(CYTHON, [], **options),
        *(
            Extension(
                ".".join(source.relative_to(ROOT).with_suffix("").parts),
                [source.relative_to(ROOT).as_posix()],
                include_dirs=include,
                **options,
            )
            for source in sources()
        ),
    ]


def translate(extensions: list[Extension]) -> None:
    """Let Cython write the C files, and put these in the place of the sources."""
    from Cython.Build import cythonize

    translated = cythonize(
        extensions,
        compiler_directives=DIRECTIVES,
        shared_utility_qualified_name=CYTHON,
        emit_linenums=LINETRACE,
        nthreads=os.cpu_count() or 0,
        quiet="--quiet" in sys.argv,
        force=DEBUG or LINETRACE,
    )
    for extension, c_extension in zip(extensions, translated, strict=True):
        extension.sources, extension.depends = c_extension.sources, c_extension.depends


def digest_of_inputs() -> str:
    """Return a digest of what the extensions are built from: tools, switches, sources."""
    import Cython
    import numpy as np

    variables = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED")
    digest = hashlib.sha256(repr([sys.version, Cython.__version__, np.__version__]).encode())
    digest.update(repr([PORTABLE, compile_args(), *map(os.environ.get, variables)]).encode())
    headers = (path for suffix in ("pxd", "h") for path in ROOT.glob(f"kvoffload/**/*.{suffix}"))
    for path in [Path(__file__), *sources(), *sorted(headers)]:
        name = str(path.relative_to(ROOT)).encode()
        digest.update(name + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class BuildExtensions(build_ext):
    """The command that builds the extensions, all of them or none."""

    def finalize_options(self) -> None:
        """Compile on every core unless the command line says otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        """Build all; where one fails, the last line says how to do without."""
        if not self.extensions:
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        built = ROOT / "build" / f"in-place{suffix}.txt"  # the digest of the extensions in place
        digest = digest_of_inputs()
        if self.inplace and not self.force and built.exists() and built.read_text() == digest:
            paths = [self.get_ext_fullpath(extension.name) for extension in self.extensions]
            if all(map(os.path.exists, paths)):
                return
        if self.inplace:
            built.unlink(missing_ok=True)
        try:
            translate(self.extensions)
            super().run()
        except (BaseError, CCompilerError) as error:
            print(error, file=sys.stderr)
            sys.exit(
                "kvoffload: the extensions cannot be built, see above; "
                "KVOFFLOAD_PURE_PYTHON=1 installs the Python implementation instead"
            )
        if self.inplace:
            built.parent.mkdir(exist_ok=True)
            built.write_text(digest)


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
