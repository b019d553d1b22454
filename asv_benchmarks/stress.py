"""Print how hit density fares on generated workloads that each favour another policy.

A row has the hit ratio less the better of LRU's and published ARC's, over capacities of 1 to 40 %
of the distinct blocks and several seeds: the worst and the mean, with its guard and without.

Usage::

    python asv_benchmarks/stress.py [--repeats SHARE] [--seeds N] [REQUESTS]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvoffload._sampling import REPEATABLE, secrets_from
from tests.policies.stress import CLASSICS, GUARDED, WORKLOADS, hit_ratios, repeated

UNGUARDED = "hit-density?guard=0"


def losses(name: str, chosen: argparse.Namespace) -> list[tuple[float, float]]:
    """Return what each cell lies above the better classic: with the guard, and without."""
    cells = []
    for seed in range(1, chosen.seeds + 1):
        requests = repeated(WORKLOADS[name](seed, chosen.requests), chosen.repeats)
        unique = len({number for request in requests for number in request})
        for percent in (1, 2, 5, 10, 20, 40):
            if unique * percent < 1600:  # a cache of a request or two
                continue
            policies = (*CLASSICS, GUARDED, UNGUARDED)
            ratios = hit_ratios(requests, unique * percent // 100, policies=policies)
            better = max(ratios[policy] for policy in CLASSICS)
            cells.append((ratios[GUARDED] - better, ratios[UNGUARDED] - better))
    return cells


@secrets_from(REPEATABLE)
def main() -> None:
    """Print what lies between hit density and the better of LRU and published ARC."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("requests", type=int, nargs="?", default=2000, help="of each workload")
    parser.add_argument(
        "--repeats", type=float, default=0.0, help="share that comes twice in a row"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of each workload, from 1")
    chosen = parser.parse_args()
    print(f"{'':14}cells{'guard: worst':>14}{'mean':>8}{'guard=0: worst':>16}{'mean':>8}")
    for name in WORKLOADS:
        cells = losses(name, chosen)
        columns = zip(*cells, strict=True)
        figures = [f"{min(over):14.4f}{sum(over) / len(cells):8.4f}" for over in columns]
        print(f"{name:14}{len(cells):5}{'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
