"""The interface that is declared of SGLang is that of the release; a difference is named."""

from __future__ import annotations

import ast
import json
import logging
import runpy
from pathlib import Path

import pytest
from sglang.version import __version__

import kvoffload.integrations.sglang as integration
from kvoffload.integrations.structure import check_interface, describe, differences, read_interface
from tests.isolated.scripts import run_copy

FILE = Path(integration.__file__).with_name("interface.json")
ROOT = Path(__file__).parents[2]


def test_the_installed_release_is_as_declared() -> None:
    release, interface = read_interface(FILE)
    assert release == __version__
    assert differences(interface, describe(interface)) == []
    script = runpy.run_path(str(ROOT / ".ci" / "interface.py"))
    file, interface = script["of_other"]("sglang")
    assert (file.name, f"{script['text_of'](interface)}\n") == (FILE.name, FILE.read_text("utf-8"))


def test_every_name_that_is_imported_is_declared() -> None:
    _, interface = read_interface(FILE)
    for path in FILE.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt."):
                declared = {name.partition(".")[0] for name in interface[str(node.module)]}
                assert {name.name for name in node.names} <= declared, node.module


def test_another_release_alike_works_with_a_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING, "kvoffload.sglang"):
        check_interface("p", "SGLang", __version__, FILE)
        assert caplog.messages == []
        check_interface("p", "SGLang", "0.6.0", FILE)
    release, _ = read_interface(FILE)
    (message,) = caplog.messages
    assert "SGLang 0.6.0 is not the release that was tested" in message
    assert release in message


def test_each_difference_is_named(tmp_path) -> None:
    held = json.loads(FILE.read_text(encoding="utf-8"))
    storage = held["interface"]["sglang.srt.mem_cache.hicache_storage"]
    storage["HiCacheStorage.batch_get_v2"]["parameters"].append("stream=None")
    storage["PoolName"]["has"].append("COLD")
    held["interface"]["sglang.srt.absent"] = {"Name": {}}
    path = tmp_path / "interface.json"
    path.write_text(json.dumps(held))
    with pytest.raises(ImportError) as caught:
        check_interface("kvoffload.integrations.sglang", "SGLang", "0.6.0", path)
    text = str(caught.value)
    assert text.startswith("kvoffload.integrations.sglang found SGLang 0.6.0")
    assert "batch_get_v2: parameters: expected stream=None; found none" in text
    assert "PoolName: has: expected COLD; found none" in text
    assert "sglang.srt.absent cannot be imported" in text


@pytest.mark.parametrize(
    "text", ["", "{}", '{"release": 1, "interface": {}}', '{"release": "1", "interface": {"m": 1}}']
)
def test_a_damaged_file_says_what_to_do(tmp_path, text) -> None:
    path = tmp_path / "interface.json"
    path.write_text(text)
    with pytest.raises(
        ImportError, match=r"cannot read .*interface\.json .*install kvoffload anew"
    ):
        read_interface(path)


def test_a_difference_ends_the_import() -> None:
    program = (
        "from sglang.srt.mem_cache import hicache_storage\n"
        "del hicache_storage.HiCacheStorageExtraInfo\n"
        "import kvoffload.integrations.sglang\n"
    )
    done = run_copy(program)
    assert done.returncode == 1
    assert "has no HiCacheStorageExtraInfo" in done.stderr
