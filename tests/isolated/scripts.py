"""Run a script in a process of its own, with the package of this checkout or installation."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 300


def run_python(
    *arguments: object, timeout: float | None = TIMEOUT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; return how it ended, and what it printed."""
    command = [sys.executable, *map(str, arguments)]
    options |= {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run(command, check=False, **options)


def run_copy(program: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a copy of this process, which has imported an engine, but no integration.

    `paths` are searched first.
    """
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        with warnings.catch_warnings():  # an engine has threads, which the copy does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            copy = os.fork()
        if not copy:
            sys.stdout, sys.stderr = stdout, stderr
            code = 1
            try:
                sys.path[:0] = map(str, paths)
                for name in [*sys.modules]:
                    if name.startswith("kvoffload.integrations"):
                        del sys.modules[name]
                exec(program, {"__name__": "__main__"})
                code = 0
            except BaseException:  # noqa: BLE001 - the process ends here
                traceback.print_exc()
            finally:
                stdout.flush()
                stderr.flush()
                os._exit(code)
        _, status = os.waitpid(copy, 0)
        printed = [file.seek(0) or file.read() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(program, os.waitstatus_to_exitcode(status), *printed)


def run_script(
    script: str,
    *arguments: str,
    environment: dict[str, str | None] | None = None,
    status: int = 0,
    options: tuple[str, ...] = (),
) -> str:
    """Run `script` and return what it printed; fail unless it ends with `status`.

    `options` are Python's, beside those that make warnings errors.
    The variables of `environment` are set; those whose value is None are taken away.
    """
    path = os.pathsep.join([str(ROOT), *sys.path])
    given = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    variables = {name: value for name, value in given.items() if value is not None}
    program = textwrap.dedent(script)
    completed = run_python("-W", "error", *options, "-c", program, *arguments, env=variables)
    if completed.returncode != status:
        raise AssertionError(
            f"the script ended with {completed.returncode}, not {status}\n"
            f"{completed.stdout}\n{completed.stderr}"
        )
    return completed.stdout
