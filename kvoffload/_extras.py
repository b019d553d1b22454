"""Features that need an extra, and the error if it is missing."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kvoffload.errors import MissingExtraError


def require(module: str, purpose: str, extra: str = "cli") -> ModuleType:
    """Import a module that belongs to an extra.

    `purpose` is the feature that needs it, as the subject of the sentence "... needs <module>".
    MissingExtraError ends with the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{purpose} needs {module}: {_command(extra)}"
        raise MissingExtraError(message, name=error.name) from error


def _command(extra: str) -> str:
    """Return the command that installs an extra.

    The command names this interpreter, since a bare ``pip`` may belong to another. Its pip finds
    the package installed, and builds nothing.
    """
    from importlib import metadata  # which takes longer to import than most modules

    requirement = ["kvoffload"]
    try:
        metadata.distribution("kvoffload")
    except metadata.PackageNotFoundError:  # a source tree on sys.path; an index would be asked
        requirement = ["-e", str(Path(__file__).parents[1])]
    requirement[-1] += f"[{extra}]"
    return shlex.join([sys.executable, "-m", "pip", "install", *requirement])
