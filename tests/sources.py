"""Modules that are compiled from Python, as plain Python."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType


def plain(module: ModuleType) -> ModuleType:
    """Return a module as Python reads its source, whether it is compiled beside it or not."""
    package, _, name = module.__name__.rpartition(".")
    source = Path(str(module.__file__)).with_name(f"{name}.py")
    loader = importlib.machinery.SourceFileLoader(f"{package}._plain{name}", str(source))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    if spec is None:
        raise ImportError(f"{source} must be a module")
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found
