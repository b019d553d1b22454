"""The interface that is declared of LMCache is that of the release; see SGLang's for the rest."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from lmcache._version import version

import kvoffload.integrations.lmcache as integration
from kvoffload.integrations.structure import describe, differences, read_interface

FILE = Path(integration.__file__).with_name("interface.json")
ROOT = Path(__file__).parents[2]


def test_the_installed_release_is_as_declared() -> None:
    release, interface = read_interface(FILE)
    assert release == version
    assert differences(interface, describe(interface)) == []
    script = runpy.run_path(str(ROOT / ".ci" / "interface.py"))
    file, interface = script["of_other"]("lmcache")
    assert (file.name, f"{script['text_of'](interface)}\n") == (FILE.name, FILE.read_text("utf-8"))


def test_every_name_that_is_imported_is_declared() -> None:
    _, interface = read_interface(FILE)
    tree = ast.parse((FILE.parent / "adapter.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmcache."):
            for name in node.names:
                assert name.name in interface[str(node.module)], (node.module, name.name)
