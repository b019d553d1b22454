"""Run a script in a process of its own, with the package of this checkout or installation."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 300


def run_script(
    script: str, *arguments: str, environment: dict[str, str | None] | None = None, status: int = 0
) -> str:
    """Run `script` and return what it printed; fail unless it ends with `status`.

    The variables of `environment` are set; those whose value is None are taken away.
    """
    path = os.pathsep.join([str(ROOT), *sys.path])
    given = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    variables = {name: value for name, value in given.items() if value is not None}
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
        env=variables,
    )
    if completed.returncode != status:
        raise AssertionError(
            f"the script ended with {completed.returncode}, not {status}\n"
            f"{completed.stdout}\n{completed.stderr}"
        )
    return completed.stdout
