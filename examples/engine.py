"""An engine in miniature: real bytes, moved between two arrays by threads, every byte verified.

`device` stands for the accelerator's memory and `host` for the offload medium. The scheduler's
thread alone talks to the manager, so it needs no lock; the workers only copy what they are told to.
Several requests are in flight at once, and the host is too small for all of them.
"""

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from kvoffload import CPUOffloadingManager

BLOCK_TOKENS = 16
BLOCK_BYTES = 16_384


def block_hashes(tokens: list[int]) -> list[bytes]:
    """Name each full block by its content and its whole prefix."""
    hashes, previous = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        previous = hashlib.sha256(previous + block).digest()
        hashes.append(previous)
    return hashes


def compute(block_hash: bytes) -> np.ndarray:
    """Stand for the model: the KV data of a block follows from its content and prefix."""
    seed = int.from_bytes(block_hash[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


@dataclass
class Request:
    """One prompt on its way: its blocks, its slots on the device, what is being stored."""

    hashes: list[bytes]
    slots: np.ndarray  # (n,) int64, slots on the device
    num_loaded: int
    storing: Sequence[bytes] = ()
    is_loading: bool = True


class Engine:
    """Run prompts through a device cache of no memory of its own, and an offload medium."""

    def __init__(self, device_blocks: int, host_blocks: int, cache_policy: str) -> None:
        self.device = np.zeros((device_blocks, BLOCK_BYTES), np.uint8)
        self.host = np.zeros((host_blocks, BLOCK_BYTES), np.uint8)
        self.free_slots = list(range(device_blocks))
        self.manager = CPUOffloadingManager(BLOCK_TOKENS, host_blocks, cache_policy)
        self.workers = ThreadPoolExecutor(4)
        self.running: dict[Future[None], Request] = {}

    def run(self, prompts: list[list[int]]) -> None:
        """Take prompts in as the device has room, and see them through."""
        waiting = deque(block_hashes(tokens) for tokens in prompts)
        while waiting or self.running:
            while waiting and len(waiting[0]) <= len(self.free_slots):
                self.start(waiting.popleft())
            for transfer in wait(self.running, return_when=FIRST_COMPLETED).done:
                request = self.running.pop(transfer)
                transfer.result()
                if request.is_loading:
                    self.loaded(request)
                else:
                    self.stored(request)

    def start(self, hashes: list[bytes]) -> None:
        """Load the prefix that the host has; it is pinned until `loaded`."""
        slots = np.array([self.free_slots.pop() for _ in hashes], np.int64)
        self.manager.touch(hashes)
        num_hits = self.manager.lookup(hashes)
        spec = self.manager.prepare_load(hashes[:num_hits])
        request = Request(hashes, slots, num_hits)
        self.transfer(request, self.host, spec.block_ids, self.device, slots[:num_hits])

    def loaded(self, request: Request) -> None:
        """Verify what came, compute the rest, and store what the host lacks."""
        hashes, slots, num_loaded = request.hashes, request.slots, request.num_loaded
        request.is_loading = False
        self.manager.complete_load(hashes[:num_loaded])
        for block_hash, slot in zip(hashes[:num_loaded], slots[:num_loaded], strict=True):
            if not np.array_equal(self.device[slot], compute(block_hash)):
                raise RuntimeError(f"block {block_hash.hex()} came back changed")
        for block_hash, slot in zip(hashes[num_loaded:], slots[num_loaded:], strict=True):
            self.device[slot] = compute(block_hash)

        output = self.manager.prepare_store(hashes)
        if output is None:  # no room: everything is pinned or pending
            self.free_slots.extend(slots.tolist())
            return
        request.storing = output.block_hashes_to_store
        place = dict(zip(hashes, slots.tolist(), strict=True))
        sources = np.array([place[block_hash] for block_hash in request.storing], np.int64)
        self.transfer(request, self.device, sources, self.host, output.store_spec.block_ids)

    def stored(self, request: Request) -> None:
        """Make the stored blocks readable for other requests."""
        self.manager.touch(request.hashes)
        self.manager.complete_store(request.storing)
        self.free_slots.extend(request.slots.tolist())

    def transfer(
        self,
        request: Request,
        source: np.ndarray,
        source_ids: np.ndarray,
        target: np.ndarray,
        target_ids: np.ndarray,
    ) -> None:
        """Copy blocks in a worker thread; the end is seen by `run`."""

        def copy() -> None:
            target[target_ids] = source[source_ids]

        self.running[self.workers.submit(copy)] = request


def conversations(count: int, turns: int, seed: int) -> list[list[int]]:
    """Make prompts: conversations over one system prompt, each turn with all turns before it."""
    chance = random.Random(seed)
    system_prompt = [chance.randrange(50_000) for _ in range(128)]
    histories = [list(system_prompt) for _ in range(count)]
    prompts = []
    for _ in range(count * turns):
        history = chance.choice(histories)
        history += [chance.randrange(50_000) for _ in range(chance.randrange(16, 96))]
        prompts.append(list(history))
    return prompts


def main() -> None:
    """Run, and say what was moved."""
    engine = Engine(device_blocks=256, host_blocks=400, cache_policy="arc")
    prompts = conversations(count=24, turns=10, seed=0)
    engine.run(prompts)
    engine.workers.shutdown()
    stats = engine.manager.stats()
    print(f"{len(prompts)} requests of {stats['lookup_blocks']} blocks")
    print(f"{stats['loaded_blocks']} blocks loaded, every byte as computed")
    print(f"{stats['stored_blocks']} blocks stored, {stats['evicted_blocks']} evicted")
    print(f"at the end {stats['pinned']} pinned, {stats['pending']} pending")


if __name__ == "__main__":
    main()
