"""What ends of sessions cost the others: the share of shared prompts' blocks that hit.

usage: ends.py [POLICY ...]

Ten tenants have a prompt of 150 blocks each and send requests that add 10 blocks, in turns drawn at
random, to 2,000 blocks of memory. In between, a client may ask for one of the prompts, with or
without ending a session on it; or a share of the tenants' own requests end their sessions.
"""

import random
import sys

from kvoffload import CPUOffloadingManager, Hints
from kvoffload.policies import registry

ENDS = Hints(ends=True)
TENANTS, PROMPT, ANSWER, BLOCKS, REQUESTS = 10, 150, 10, 2_000, 2_000


def hit_ratio(policy: str, *, asks: bool = False, says: Hints | None, share: float = 0.0) -> float:
    """Replay the tenants' requests, of which a share end; between them a client may ask."""
    rng = random.Random(1)
    manager = CPUOffloadingManager(16, BLOCKS, policy)
    prompts = [[b"%d %d" % (tenant, n) for n in range(PROMPT)] for tenant in range(TENANTS)]
    hits = 0

    def serve(blocks: list[bytes], hints: Hints | None, now: float) -> int:
        with manager.begin(blocks, hints=hints, now=now) as request:
            found = request.lookup()
            request.prepare_store()
        request.complete_store()
        return min(PROMPT, found)

    for number in range(REQUESTS):
        answer = [b"answer %d %d" % (number, n) for n in range(ANSWER)]
        blocks = rng.choice(prompts) + answer
        hits += serve(blocks, ENDS if rng.random() < share else None, number)
        if asks:
            serve(prompts[number % TENANTS], says, number)
    return hits / (REQUESTS * PROMPT)


def main(policies: list[str]) -> None:
    """Print a row per policy."""
    print(f"{'':16} a client asks, and ends; no client, three in ten end")
    for policy in policies or registry.names():
        plain = hit_ratio(policy, asks=True, says=None), hit_ratio(policy, says=None)
        ended = hit_ratio(policy, asks=True, says=ENDS), hit_ratio(policy, says=None, share=0.3)
        print(f"{policy:16} {plain[0]:.3f} {ended[0]:.3f}; {plain[1]:.3f} {ended[1]:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
