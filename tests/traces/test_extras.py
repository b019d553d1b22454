"""Features that work without the `cli` extra."""

import subprocess
import sys

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


def test_generating_surveying_writing_and_replaying_need_numpy_alone(tmp_path):
    code = f"""
from kvoffload.replay import Configuration, replay
from kvoffload.traces import Survey, Workload, write_trace
print(Survey.of(Workload(50)).requests, write_trace(Workload(50), {str(tmp_path / "t.gz")!r}))
print(replay(Workload(50), Configuration(host=100)).requests)
"""
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["50", "50", "50"]
