"""The interface that is declared of LMCache is that of the release; a difference is named."""

from __future__ import annotations

import ast
import json
import logging
import runpy
from pathlib import Path

import pytest
from lmcache._version import version

import kvoffload.integrations.lmcache as integration
from kvoffload.integrations.structure import check_interface, describe, differences, read_interface

FILE = Path(integration.__file__).with_name("interface.json")
ROOT = Path(__file__).parents[2]


def test_the_installed_release_is_as_declared() -> None:
    release, interface = read_interface(FILE)
    assert release == version
    assert differences(interface, describe(interface)) == []
    written = runpy.run_path(str(ROOT / ".ci" / "interface.py"))["written"]
    assert written(FILE.parent, version) == FILE.read_text(encoding="utf-8")


def test_every_name_that_is_imported_is_declared() -> None:
    _, interface = read_interface(FILE)
    tree = ast.parse((FILE.parent / "adapter.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmcache."):
            for name in node.names:
                assert name.name in interface[str(node.module)], (node.module, name.name)


def test_another_release_alike_works_with_a_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, "kvoffload.lmcache"):
        check_interface("p", "LMCache", version, FILE)
        assert caplog.messages == []
        check_interface("p", "LMCache", "0.6.0", FILE)
    (message,) = caplog.messages
    assert "LMCache 0.6.0 is not the release that was tested" in message


def test_each_difference_is_named(tmp_path) -> None:
    held = json.loads(FILE.read_text(encoding="utf-8"))
    adapters = held["interface"]["lmcache.v1.distributed.l2_adapters.base"]
    adapters["L2AdapterInterface"]["abstract"].append("submit_rename_task")
    path = tmp_path / "interface.json"
    path.write_text(json.dumps(held))
    with pytest.raises(ImportError, match=r"abstract: expected submit_rename_task; found none"):
        check_interface("kvoffload.integrations.lmcache", "LMCache", "0.6.0", path)
