"""What the package can do only with an extra installed, and how it says so."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

INSTALL = "pip install 'kvoffload[{}]'"


class MissingExtraError(ImportError):
    """Something was asked for that needs an extra which is not installed."""


def require(module: str, purpose: str, extra: str = "cli") -> ModuleType:
    """Import a module that belongs to an extra.

    Parameters
    ----------
    module : str
        Full name of the module.
    purpose : str
        What needs it, as the subject of the sentence "... needs <module>".
    extra : str
        The extra that installs it.

    Raises
    ------
    MissingExtraError
        If it is not installed; the message names what to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        message = f"{purpose} needs {module}: {INSTALL.format(extra)}"
        raise MissingExtraError(message, name=error.name) from error
