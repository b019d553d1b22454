"""Features that work without the `cli` extra, and the error of those that do not."""

import subprocess
import sys

import pytest

PRELUDE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"msgspec", "click", "rich", "backports", "zstandard"} or (
            name == "compression.zstd"
        ):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_without_extra(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_generating_surveying_writing_and_replaying_need_numpy_alone(tmp_path):
    out = run_without_extra(f"""
from kvoffload import CPUOffloadingManager
from kvoffload.replay import replay
from kvoffload.traces import Survey, Workload, write_trace
print(Survey.of(Workload(50)).requests, write_trace(Workload(50), {str(tmp_path / "t.gz")!r}))
print(replay(Workload(50), CPUOffloadingManager(16, 100)).requests)
""")
    assert out.split() == ["50", "50", "50"]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("list(Trace({path!r}))", "reading a trace needs msgspec"),
        ("write_trace(Workload(1), {path!r} + '.zst')", "a zstandard trace needs"),
    ],
)
def test_the_message_names_what_is_missing_and_how_to_get_it(tmp_path, code, what):
    path = tmp_path / "t.jsonl"
    path.write_text("{}")
    out = run_without_extra(f"""
from kvoffload.traces import MissingExtraError, Trace, Workload, write_trace
try: {code.format(path=str(path))}
except MissingExtraError as error: print(error)
""")
    assert what in out
    assert "pip install 'kvoffload[cli]'" in out
    assert out.count("\n") == 1
