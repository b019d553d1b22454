"""Count the instructions of the compiled manager's calls; time on a shared machine is noise.

usage: instructions.py count          under this interpreter, the package found first; prints JSON
       instructions.py compare A B    two such files; exit status 1 if a call of B takes 3 % more
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS = ("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store")
POLICIES = ("lru", "arc")
TOLERANCE = float(os.environ.get("KVO_TOLERANCE", "0.03"))
CAPACITY, REQUEST, ROUNDS = 4_000, 128, 40


def work(policy: str) -> None:
    """Make the calls that are counted: requests that hit, then stores that evict."""
    # The index keys its hash by chance; a count that can be compared needs the same keys each time.
    os.urandom = lambda size: bytes(range(7, 7 + size))
    from kvoffload._compiled import CPUOffloadingManager

    manager = CPUOffloadingManager(16, CAPACITY, policy)
    keys = [number.to_bytes(8, "big") * 4 + b"\0\0\0\0" for number in range(2 * CAPACITY)]
    requests = [keys[start : start + REQUEST] for start in range(0, len(keys), REQUEST)]
    for request in requests[: CAPACITY // REQUEST]:
        manager.complete_store(manager.prepare_store(request).block_hashes_to_store)
    for number in range(ROUNDS):
        request = requests[number * 7 % (CAPACITY // REQUEST)]
        manager.touch(request)
        manager.prepare_load(request[: manager.lookup(request)])
        manager.complete_load(request)
    for number in range(ROUNDS):
        request = requests[(CAPACITY // REQUEST + number) % len(requests)]
        output = manager.prepare_store(request)
        manager.complete_store(output.block_hashes_to_store)


def count(policy: str) -> dict[str, int]:
    """Give the instructions of each call and all it calls, summed over the run."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "callgrind.out")
        # callgrind heeds one pattern: every method that Python calls on the manager
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no"]
        command += ["--toggle-collect=__pyx_pw_*_manager_c_*Manager_*"]
        command += [f"--callgrind-out-file={profile}", sys.executable, __file__, "work", policy]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        table = subprocess.run(
            ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(profile)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    counts = {}
    for call in CALLS:
        found = re.search(rf"^ *([\d,]+) .*:__pyx_pw_\w*Manager_\d+{call}\b", table, re.MULTILINE)
        if found is None:
            raise SystemExit(f"{call} was not seen by callgrind")
        counts[f"{policy} {call}"] = int(found[1].replace(",", ""))
    return counts


def compare(before: Path, after: Path) -> int:
    """Print the ratio of each call; give 1 if one exceeds the tolerance."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    worst = 0.0
    for call in new.keys() & old.keys():
        worst = max(worst, new[call] / old[call])
    for call in sorted(new):
        ratio = f"{new[call] / old[call]:8.4f}" if call in old else "     new"
        print(f"{call:24} {old.get(call, 0):12,} {new[call]:12,} {ratio}")
    print(f"result: worst ratio to the parent commit {worst:.4f}")
    return int(worst > 1 + TOLERANCE)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "work":
        work(*arguments)
    elif task == "count":
        counted = {call: value for policy in POLICIES for call, value in count(policy).items()}
        print(json.dumps(counted, indent=1))
    else:
        sys.exit(compare(*map(Path, arguments)))
