"""Features that need an extra, and the error where it is missing."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from types import ModuleType


class MissingExtraError(ImportError):
    """A feature needs an extra that is not installed."""


def require(module: str, purpose: str, extra: str = "cli") -> ModuleType:
    """Import a module that belongs to an extra.

    Parameters
    ----------
    module : str
        Full name of the module.
    purpose : str
        The feature that needs it, as the subject of the sentence "... needs <module>".
    extra : str
        The extra that installs it.

    Raises
    ------
    MissingExtraError
        If it is not installed; the message is the command that installs it. It names this
        interpreter, whose pip finds the package installed; a bare ``pip`` may belong to another.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        command = [sys.executable, "-m", "pip", "install", f"kvoffload[{extra}]"]
        message = f"{purpose} needs {module}: {shlex.join(command)}"
        raise MissingExtraError(message, name=error.name) from error
